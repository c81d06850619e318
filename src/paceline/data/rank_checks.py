"""Checks that all ranks load the same data with the same settings, each its own part of it."""

import ctypes
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.checked import all_gather
from paceline.data.cursor import check_integer
from paceline.errors import UsageError
from paceline.member import in_elastic_job
from paceline.world import World

_HASHED_BYTES = 1 << 20  # of each tensor
_NOTHING = -1  # the digest of a batch that holds nothing to compare


class DataDiffers(UsageError):
    """Ranks are about to load different datasets, or the same dataset with different settings."""


def rank_and_size(rank: int | None, size: int | None, size_name: str) -> tuple[int, int]:
    """(rank, size): as given, else those of the process group, else of the launcher's environment.

    A member of an elastic job has no world before its first generation: until then it counts as a world of one.
    """
    if rank is None or size is None:
        if dist.is_available() and dist.is_initialized():
            here = dist.get_rank(), dist.get_world_size()
        elif in_elastic_job():
            here = 0, 1
        else:
            world = World.from_env()
            here = world.rank, world.size
        rank = here[0] if rank is None else rank
        size = here[1] if size is None else size
    check_integer(size_name, size, lowest=1)
    check_integer("rank", rank, lowest=0)
    if rank >= size:
        raise UsageError(f"rank must be below {size_name}={size}, got rank={rank}; ranks count from 0")
    return rank, size


def ranks_can_compare(size: int) -> bool:
    """Whether the process group is the world over which the data are distributed."""
    return size > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() == size


def check_settings(settings: Mapping[str, int], rank: int, newest_session: int) -> int:
    """Raise DataDiffers on all ranks if `settings` differ between them. Returns the largest session of all ranks."""
    mine = torch.tensor([rank, newest_session, *settings.values()], dtype=torch.int64, device="cpu")
    rows = [row.tolist() for row in all_gather(mine)]
    for place, name in enumerate(settings, start=2):
        if len({row[place] for row in rows}) > 1:
            raise DataDiffers(_different(name, [row[place] for row in rows]))
    loading_as: defaultdict[int, list[int]] = defaultdict(list)
    for group_rank, row in enumerate(rows):
        loading_as[row[0]].append(group_rank)
    for as_rank, ranks in loading_as.items():
        if len(ranks) > 1:
            raise DataDiffers(
                f"ranks {_listed(ranks)} would all load the samples of rank {as_rank}, expected each rank once. Leave "
                f"out rank=, or pass a different one on each rank"
            )
    return max(int(row[1]) for row in rows)


def _different(name: str, values: Sequence[int]) -> str:
    by_rank = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    what, remedy = {
        "length": ("the dataset has different lengths on different ranks", "Pass the whole dataset on every rank"),
        "batch_size": ("ranks have different batch sizes", "Pass the same on every rank; it counts samples per rank"),
        "seed": ("ranks have different seeds for the order of samples", "Pass the same seed on every rank"),
        "epoch": ("ranks are in different epochs", "Load the same checkpoint on every rank"),
        "committed": ("ranks are at different positions of the epoch", "Load the same checkpoint on every rank"),
    }.get(name, (f"ranks have different values of {name}", "Pass the same on every rank"))
    return f"{what}, so samples would be lost or repeated ({by_rank}). {remedy}"


def check_first_batch(batch: Any) -> None:
    """Warn, once and on rank 0, when two ranks hold the same batch. All ranks of the process group must call it.

    A Loader does this itself. Call it when you use a DataLoader of your own.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    digests = [int(row) for row in all_gather(torch.tensor([digest(batch)], dtype=torch.int64, device="cpu"))]
    same: defaultdict[int, list[int]] = defaultdict(list)
    for rank, found in enumerate(digests):
        if found != _NOTHING:
            same[found].append(rank)
    for ranks in same.values():
        if len(ranks) > 1 and dist.get_rank() == 0:
            warnings.warn(
                f"ranks {_listed(ranks)} got the same first batch, so they do the same work. Shard the samples with "
                f"paceline.Loader or a DistributedSampler; if the dataset draws its samples at random, seed it with "
                f"the rank or by the index",
                UserWarning,
                stacklevel=3,
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def digest(batch: Any) -> int:
    """A number of 63 bits that is equal for equal batches; -1 if the batch holds nothing to compare."""
    hashed = hashlib.blake2b(digest_size=8)
    return int.from_bytes(hashed.digest()) >> 1 if _feed(hashed, batch) else _NOTHING


def _feed(hashed: "hashlib.blake2b", value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or not value.numel() or value.is_meta:
            return False
        flat = value.detach().reshape(-1)[: max(1, _HASHED_BYTES // value.element_size())].cpu().contiguous()
        hashed.update(repr(tuple(value.shape)).encode())
        hashed.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
        return True
    if isinstance(value, str | bytes | int | float | complex):
        hashed.update(repr(value).encode())
        return True
    if isinstance(value, Mapping | Sequence):
        inside = value.values() if isinstance(value, Mapping) else value
        return sum(_feed(hashed, found) for found in inside) > 0
    if hasattr(value, "tobytes"):  # an array of numpy
        hashed.update(value.tobytes()[:_HASHED_BYTES])
        return True
    return False
