"""The kernels of the ranks: processes, channels, one cell on them, the stop button, and which ranks wait for which."""
