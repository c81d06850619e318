"""What ranks tell each other once per reduction: a few words, and what follows from them.

The words of all ranks are gathered by one small collective that flies beside the last buckets. They do not ride inside
one, because a communication hook may compress it, its dtype may not hold them, and only when backward has ended is it
known whether it ended well.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, Flag

import torch

from paceline.collectives.api import Transport
from paceline.collectives.wait import finish
from paceline.errors import BackwardAborted, CollectiveMismatch, GraphChanged, UnusedParameters
from paceline.reducer.slot import GradSlot

logger = logging.getLogger("paceline")

WORD_COUNT = 17


class Vote(Flag):
    """What a rank asks of all of them, once per reduction."""

    NOTHING = 0
    STOP = 1  # end the run after this step
    SAVE = 2  # write a checkpoint after this step, and go on
    EXHAUSTED = 4  # this rank has no more data


class Mode(Enum):
    """What kind of backwards a rank has run since the last reduction."""

    NOTHING = 0
    PLAIN = 1
    WEIGHTED = 2
    MIXED = 3

    def and_then(self, other: "Mode") -> "Mode":
        return other if self in (Mode.NOTHING, other) else Mode.MIXED


@dataclass(frozen=True, slots=True)
class Words:
    """One rank's words."""

    reduction: int  # how many reductions this rank has begun: must be equal
    unused: int  # parameters that took no part
    late: int  # gradients that came after their bucket had left
    mode: Mode  # plain and weighted backwards must not meet
    weight: float  # sum of the weights of this rank's micros
    micros: int = 0  # backwards since the last reduction
    ready: int = 0  # gradients that came through a backward
    graph_changed: bool = False  # though it was declared static
    aborted: bool = False  # the backward ended with an exception on this rank
    skipped: bool = False  # this rank has no part in the mean
    votes: Vote = Vote.NOTHING
    calls: int = 0  # digest of all buckets that were ever launched: must be equal
    state: int = 0  # see reducer/oversight.py for this one and the next two
    signature: int = 0
    not_finite: int = 0
    lane_step: int = 0  # the step whose lanes run: must be equal
    lane_shape: int = 0  # see reducer/lane_shapes.py
    lane_weights: tuple[float, ...] = ()  # of the lanes that this rank ran, and zeros

    def encode(self) -> torch.Tensor:
        values = [
            self.reduction,
            self.unused,
            self.late,
            self.mode.value,
            *_bits(self.weight),
            self.micros,
            self.ready,
            int(self.graph_changed),
            int(self.aborted),
            int(self.skipped),
            self.votes.value,
            self.calls,
            self.state,
            self.signature,
            self.not_finite,
            self.lane_step,
            self.lane_shape,
        ]
        return torch.tensor([*values, *_bits(*self.lane_weights)], dtype=torch.int64)

    @classmethod
    def decode(cls, row: Sequence[int]) -> "Words":
        return cls(
            reduction=row[0],
            unused=row[1],
            late=row[2],
            mode=Mode(row[3]),
            weight=_floats(row[4:5])[0],
            micros=row[5],
            ready=row[6],
            graph_changed=bool(row[7]),
            aborted=bool(row[8]),
            skipped=bool(row[9]),
            votes=Vote(row[10]),
            calls=row[11],
            state=row[12],
            signature=row[13],
            not_finite=row[14],
            lane_step=row[15],
            lane_shape=row[16],
            lane_weights=_floats(row[WORD_COUNT:]),
        )


def _bits(*values: float) -> tuple[int, ...]:
    return struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values))


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(words)}d", struct.pack(f"<{len(words)}q", *words))


class SentWords:
    """The words of this rank, on their way to all others."""

    def __init__(self, words: Words, transport: Transport) -> None:
        encoded = words.encode()
        self._gathered = torch.empty(transport.size, len(encoded), dtype=torch.int64)
        self.work = transport.all_gather(self._gathered, encoded)

    def of_all_ranks(self) -> list[Words]:
        """Once `work` is complete: the words in rank order. Raises on every rank when they cannot belong together."""
        return decode_all(self._gathered)


def decode_all(gathered: torch.Tensor) -> list[Words]:
    """The words of all ranks, in rank order; raises on every rank when they cannot belong together."""
    rows = [Words.decode(row) for row in gathered.tolist()]
    if any(row.aborted for row in rows):
        return rows
    counts = [row.reduction for row in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatch(
            f"ranks reduced gradients of different steps: {_by_rank(counts)} reductions so far; run the same number of "
            f"backward passes, and the same no_sync() blocks, on every rank"
        )
    if len({row.calls for row in rows}) > 1:
        raise CollectiveMismatch(
            f"ranks have reduced different buckets so far ({_by_rank([f'{r.calls:x}' for r in rows])}), so gradients "
            f"of different parameters may have been added up; this is a fault of paceline or of the memory of a rank"
        )
    _check_lanes(rows)
    modes = {row.mode for row in rows}
    if Mode.MIXED in modes or {Mode.PLAIN, Mode.WEIGHTED} <= modes:
        raise CollectiveMismatch(
            f"some backwards of this step ran inside weight() and some outside ({_by_rank([r.mode.name for r in rows])}"
            f"); put every micro of a step, on every rank, inside weight()"
        )
    _warn_of_uneven_micros(rows)
    return rows


def _check_lanes(rows: Sequence[Words]) -> None:
    steps = [row.lane_step for row in rows]
    if len(set(steps)) > 1:
        raise CollectiveMismatch(
            f"ranks run lanes of different steps ({_by_rank(steps)}), so their random numbers do not belong together; "
            f"give model.lanes(micros, step) the same step on every rank"
        )


def _warn_of_uneven_micros(rows: Sequence[Words]) -> None:
    micros = [row.micros for row in rows]
    if rows[0].mode is Mode.PLAIN and len({count for count in micros if count}) > 1:
        logger.warning(
            "ranks ran different numbers of backwards for one reduction (%s), so their batches count differently in "
            "the mean; use the same no_sync() blocks on every rank, or weight()",
            _by_rank(micros),
        )


def aborted_error(words: Sequence[Words]) -> BackwardAborted:
    """What the ranks whose own backward was fine are told."""
    ranks = [rank for rank, row in enumerate(words) if row.aborted]
    listed = ", ".join(str(rank) for rank in ranks)
    return BackwardAborted(
        f"the backward ended with an exception on rank {listed}, so there are no gradients for this step on any rank; "
        f"see that rank's own error, then skip the step or stop on all ranks",
        ranks=ranks,
    )


def graph_error(words: Sequence[Words]) -> GraphChanged:
    """What the ranks whose own graph is unchanged are told."""
    listed = ", ".join(str(rank) for rank, row in enumerate(words) if row.graph_changed)
    return GraphChanged(
        f"Your training graph has changed in this iteration on rank {listed}, which is not compatible with "
        f"static_graph=True; see that rank's own error for the parameters"
    )


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


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
        grad, extra = slot.param.grad, torch.zeros_like(slot.view)  # equal dtype on all ranks, whatever the gradient's
        if grad is not None:
            extra = extra + grad * scale if slot.meta.sparse else extra.add_(grad, alpha=scale)
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
    return _unused(lines, "the backward")


def unused_in_lanes(slots: Sequence[GradSlot], uses: Sequence[int]) -> UnusedParameters | None:
    """The error for every rank, if there are parameters that no lane of this step has used."""
    lines = [f"  {slot.meta.name}: unused in all lanes" for slot in slots if not uses[slot.index]]
    return _unused(lines, "any lane of this step") if lines else None


def _unused(lines: Sequence[str], where: str) -> UnusedParameters:
    return UnusedParameters(
        f'unused="error" was asked for, and these parameters took no part in {where}:\n'
        + "\n".join(lines)
        + '\nUse them in the loss, freeze them (requires_grad_(False)) before wrapping, or pass unused="zero".'
    )


def _where(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "unused on all ranks"
    if len(ranks) == 1:
        return f"unused on rank {ranks[0]} only"
    return "unused on ranks " + ", ".join(str(rank) for rank in ranks)
