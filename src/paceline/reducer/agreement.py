"""What ranks tell each other once per reduction: a few words, and what follows from them.

The words of all ranks are gathered by one small collective that flies beside the last bucket. They do not ride inside
the bucket, because a communication hook may compress it, its dtype may not hold them, and on a GPU reading them would
stall the host.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.collectives.api import Transport
from paceline.collectives.wait import finish
from paceline.errors import CollectiveMismatch, UnusedParameters
from paceline.reducer.bucket import GradSlot

WORD_COUNT = 8


@dataclass(frozen=True, slots=True)
class Words:
    """One rank's words."""

    reduction: int  # how many reductions this rank has begun: must be equal
    unused: int  # parameters that took no part
    late: int  # gradients that came after their bucket had left
    weighted: bool  # whether `weight` counts: must be equal
    weight: float  # sum of the weights of this rank's micros

    def encode(self) -> torch.Tensor:
        (weight_bits,) = struct.unpack("<q", struct.pack("<d", self.weight))
        values = [self.reduction, self.unused, self.late, int(self.weighted), weight_bits]
        return torch.tensor(values + [0] * (WORD_COUNT - len(values)), dtype=torch.int64)

    @classmethod
    def decode(cls, row: Sequence[int]) -> "Words":
        (weight,) = struct.unpack("<d", struct.pack("<q", row[4]))
        return cls(row[0], row[1], row[2], bool(row[3]), weight)


def decode_all(gathered: torch.Tensor) -> list[Words]:
    """The words of all ranks, in rank order; raises on every rank when they cannot belong together."""
    rows = [Words.decode(row) for row in gathered.view(-1, WORD_COUNT).tolist()]
    for what, values in (
        ("the number of reductions so far", [row.reduction for row in rows]),
        ("whether the step is inside weight()", [row.weighted for row in rows]),
    ):
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise CollectiveMismatch(
                f"ranks reduced gradients of different steps: {what} differs ({listed}); run the same number of "
                f"backward passes, and the same no_sync() and weight() blocks, on every rank"
            )
    return rows


def count_uses(slots: Sequence[GradSlot], transport: Transport, timeout_s: float | None) -> list[int]:
    """On how many ranks each parameter took part. All ranks call it, or none."""
    uses = torch.tensor([slot.used for slot in slots], dtype=torch.int32)
    finish(
        transport.all_reduce(uses), what="the count of unused parameters", watch=transport.watch, timeout_s=timeout_s
    )
    return [int(count) for count in uses.tolist()]


def reduce_late(slots: Sequence[GradSlot], transport: Transport, scale: float, timeout_s: float | None) -> None:
    """Reduce what nested backwards delivered after the buckets had left, and add it. All ranks call it, or none."""
    flags = torch.tensor([slot.late for slot in slots], dtype=torch.int32)
    finish(transport.all_reduce(flags), what="the list of late gradients", watch=transport.watch, timeout_s=timeout_s)
    for slot, flag in zip(slots, flags.tolist(), strict=True):
        if not flag:
            continue
        grad = slot.param.grad
        extra = torch.zeros_like(slot.view) if grad is None else grad * scale
        what = f"the late gradient of {slot.meta.name}"
        finish(transport.all_reduce(extra), what=what, watch=transport.watch, timeout_s=timeout_s)
        slot.param.grad = None
        if slot.meta.sparse:
            slot.bucket.flat = slot.bucket.flat + extra
        else:
            slot.view.add_(extra)


def unused_error(slots: Sequence[GradSlot], transport: Transport, timeout_s: float | None) -> UnusedParameters:
    """The same error for every rank: which parameters took no part, and where. All ranks call it, or none."""
    mine = torch.tensor([slot.used for slot in slots], dtype=torch.uint8)
    every = torch.empty(transport.size * len(slots), dtype=torch.uint8)
    work = transport.all_gather(every, mine)
    finish(work, what="the list of unused parameters", watch=transport.watch, timeout_s=timeout_s)
    used = every.view(transport.size, len(slots)).tolist()
    lines = []
    for slot in slots:
        ranks = [rank for rank in range(transport.size) if not used[rank][slot.index]]
        if ranks:
            lines.append(f"  {slot.meta.name}: {_where(ranks, transport.size)}")
    return UnusedParameters(
        'unused="error" was asked for, and these parameters took no part in the backward:\n'
        + "\n".join(lines)
        + '\nUse them in the loss, freeze them (requires_grad_(False)) before wrapping, or pass unused="zero".'
    )


def _where(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "unused on all ranks"
    if len(ranks) == 1:
        return f"unused on rank {ranks[0]} only"
    return "unused on ranks " + ", ".join(str(rank) for rank in ranks)
