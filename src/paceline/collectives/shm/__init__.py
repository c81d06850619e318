"""Shared memory between the ranks of one host."""

from paceline.collectives.shm.transport import ShmTransport

__all__ = ["ShmTransport"]
