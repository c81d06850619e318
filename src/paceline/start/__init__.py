"""Forming the world, leaving it, and simple queries about it."""

from paceline.start.lifecycle import get, init, shutdown

__all__ = ["get", "init", "shutdown"]
