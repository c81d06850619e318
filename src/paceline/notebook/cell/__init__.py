"""What stands in a cell: which lines run where, on which ranks, and whether they hold collectives."""
