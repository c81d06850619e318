"""paceline: data-parallel training for PyTorch."""

from paceline.collectives.checked import all_gather, all_reduce, barrier, broadcast
from paceline.data.sampler import DistributedSampler
from paceline.replica.ddp import DistributedDataParallel
from paceline.start import get, init, shutdown
from paceline.world import World

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "get",
    "init",
    "shutdown",
]
