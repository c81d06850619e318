"""Training that outlives its ranks: survivors keep their state, go on with the ranks that there are, redo one step."""
