"""Which rank of how many loads here, and checks of whole numbers."""

import operator
from typing import SupportsIndex

import torch.distributed as dist

from paceline.errors import UsageError
from paceline.world import World


def place(rank: int | None, size: int | None, size_name: str) -> tuple[int, int]:
    """(rank, size): as given, else those of the process group, else of the launcher's environment."""
    if rank is None or size is None:
        here_rank, here_size = _here()
        rank = here_rank if rank is None else rank
        size = here_size if size is None else size
    check_whole(size_name, size, lowest=1)
    check_whole("rank", rank, lowest=0)
    if rank >= size:
        raise UsageError(f"rank must be below {size_name}={size}, got rank={rank}; ranks count from 0")
    return rank, size


def _here() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = World.from_env()
    return world.rank, world.size


def check_whole(name: str, number: object, lowest: int | None = None) -> None:
    """Refuse what is no whole number, or one that is too small."""
    # SupportsIndex, as in torch: integers of numpy are as good as ours.
    if not isinstance(number, SupportsIndex) or (lowest is not None and operator.index(number) < lowest):
        at_least = "" if lowest is None else f" of at least {lowest}"
        raise UsageError(f"{name} must be a whole number{at_least}, got {number!r}")
