"""The ranks: their processes, their channels, one cell on them, the stop button, and who waits for whom."""
