"""Shared memory between the ranks of one host."""

from paceline.collectives.shm.meet import meet
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.presence import Presence, Refusal, share_host
from paceline.collectives.shm.transport import ShmTransport

__all__ = ["Mesh", "Presence", "Refusal", "ShmTransport", "meet", "share_host"]
