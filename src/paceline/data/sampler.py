"""torch's DistributedSampler, with a world that may have been read from the environment."""

import operator
from collections.abc import Sized
from typing import Any, SupportsIndex, TypeVar

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.errors import UsageError
from paceline.world import World

T_co = TypeVar("T_co", covariant=True)


class DistributedSampler(TorchDistributedSampler[T_co]):
    """Deals the indices of `dataset` to ranks, in exactly the order of torch's class of this name.

    `num_replicas` and `rank` come from the process group; before there is one, from the launcher's environment (a
    world of one without a launcher). Call `set_epoch` before each epoch, or every epoch has the same order.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError(f"dataset must have a length, got {type(dataset).__name__}, which has no __len__")
        if num_replicas is None or rank is None:
            size, own = _here()
            num_replicas = size if num_replicas is None else num_replicas
            rank = own if rank is None else rank
        _check_whole("num_replicas", num_replicas, lowest=1)
        _check_whole("rank", rank, lowest=0)
        _check_whole("seed", seed)
        if rank >= num_replicas:
            raise UsageError(f"rank must be below num_replicas={num_replicas}, got rank={rank}; ranks count from 0")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order. The same on all ranks, before the loader is iterated."""
        _check_whole("epoch", epoch)
        super().set_epoch(epoch)


def _here() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    world = World.from_env()
    return world.size, world.rank


def _check_whole(name: str, number: object, lowest: int | None = None) -> None:
    # SupportsIndex, as in torch: integers of numpy are as good as ours.
    if not isinstance(number, SupportsIndex) or (lowest is not None and operator.index(number) < lowest):
        at_least = "" if lowest is None else f" of at least {lowest}"
        raise UsageError(f"{name} must be a whole number{at_least}, got {number!r}")
