"""The kernels of the ranks: processes, channels, one cell on them, the stop button, and who waits for whom."""
