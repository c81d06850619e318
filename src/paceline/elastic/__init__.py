"""Training that survives the loss of ranks: survivors keep their state, form a new group and redo one step."""
