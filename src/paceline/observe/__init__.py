"""The read side: what traces and counters say."""
