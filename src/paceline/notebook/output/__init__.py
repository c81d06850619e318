"""What the user sees: output with a gutter of ranks, errors once, startup, status, and what each rank did."""
