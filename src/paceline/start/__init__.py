"""Forming the world, leaving it, and asking it simple questions."""

from paceline.start.lifecycle import get, init, shutdown

__all__ = ["get", "init", "shutdown"]
