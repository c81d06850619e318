"""The order of an epoch and how it is dealt: pure functions of numbers, with no rank's memory in them.

An epoch is one permutation of the dataset. A global batch is the next so many samples of it, and what a rank (or a
lane) gets of the batch is a slice. So where a run stands is one number, and any world can go on from it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from paceline.errors import UsageError
from paceline.randomness import mixed

__all__ = ["Cursor", "cuts", "deal", "fingerprint", "mixed", "order"]

_SAMPLED = 256  # how many places of an order its fingerprint looks at


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands in its data: `committed` samples of epoch `epoch` are done, counted over all ranks."""

    seed: int = 0
    epoch: int = 0
    committed: int = 0

    def __post_init__(self) -> None:
        for name in ("epoch", "committed"):
            if getattr(self, name) < 0:
                raise UsageError(f"a cursor's {name} must be at least 0, got {getattr(self, name)}")


def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> torch.Tensor:
    """The samples of one epoch in the order in which they are used: int64 indices of a dataset of `length`.

    It takes 8 bytes per sample on every rank: 8 MB for a million samples, 8 GB for 10⁹.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(mixed(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def deal(order: torch.Tensor, committed: int, global_batch: int, shares: int | Sequence[int]) -> list[torch.Tensor]:
    """Cut the global batch that begins after `committed` samples of `order` into slices, one per share.

    `shares` is a number of equal shares, or the weight of each: ranks that run 3, 3 and 2 of 8 lanes get exactly what
    those lanes would get. At the end of the order the batch is what is left, and its slices may be uneven or empty.
    """
    batch = order[committed : committed + global_batch]
    return [batch[start:stop] for start, stop in pairwise(cuts(len(batch), shares))]


def cuts(count: int, shares: int | Sequence[int]) -> list[int]:
    """Where `count` samples are cut: share k is from the k-th number to the next."""
    weights = [1] * shares if isinstance(shares, int) else list(shares)
    total = sum(weights)
    if total < 1 or min(weights) < 0:
        raise UsageError(f"shares must be a positive number, or weights of which one is positive, got {shares!r}")
    # Rounded up: if there is less than one sample for each, the first shares have it.
    return [-(-count * before // total) for before in accumulate(weights, initial=0)]


def fingerprint(order: torch.Tensor) -> str:
    """A short text that differs when the order does: another version of torch may draw another permutation."""
    places = torch.linspace(
        0, max(len(order) - 1, 0), min(_SAMPLED, len(order)), dtype=torch.float64, device="cpu"
    ).long()
    return hashlib.blake2b(repr(order[places].tolist()).encode(), digest_size=8).hexdigest()
