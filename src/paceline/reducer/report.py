"""What ranks tell each other once per reduction, and what follows from it.

The reports of all ranks are gathered by one small collective beside the last buckets. They do not ride inside one,
because a communication hook may compress it, its dtype may not hold them, and only when backward has ended is it known
whether it ended well. How they travel, and when they are read, stands in `exchange.py`.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, Flag

import torch

from paceline.collectives.group import Group
from paceline.errors import BackwardAborted, CollectiveMismatch, GraphChanged, UnusedParameters
from paceline.reducer.slot import GradSlot

logger = logging.getLogger("paceline")

# Where a report has what is read on the device: a rank's gradients are not to be used (a float32, 1.0 or 0.0, in the
# first half of the column), its weight, the digest of its state, and what it has found not to be finite.
BROKEN, WEIGHT, STATE, NOT_FINITE = 0, 5, 13, 15
HEADER = 20  # columns before those of used parameters and of lanes
BITS = 62  # used parameters per column


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


class Abort(Enum):
    """Why a rank has no gradients for a reduction that the others wait for."""

    NO = 0
    EXCEPTION = 1  # its backward ended with an exception
    THREADS = 2  # two of its threads ran a backward at once


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank tells."""

    reduction: int  # how many reductions this rank has begun: must be equal
    unused: int  # parameters that took no part
    late: int  # gradients that came after their bucket had left
    mode: Mode  # plain and weighted backwards must not meet
    weight: float  # sum of the weights of this rank's microbatches
    micros: int = 0  # backwards since the last reduction
    ready: int = 0  # gradients that came through a backward
    graph_changed: bool = False  # though it was declared static
    abort: Abort = Abort.NO
    skipped: bool = False  # this rank has no part in the mean
    votes: Vote = Vote.NOTHING
    calls: int = 0  # digest of all buckets that were ever launched: must be equal
    state: int = 0  # see reducer/oversight.py for this one and the next two
    signature: int = 0
    not_finite: int = 0
    lane_step: int = 0  # the step whose lanes run: must be equal
    lane_shape: int = 0  # see reducer/lane_shapes.py
    several: bool = False  # other replicas take part in the same backward: see reducer/backward.py
    asleep: int = 0  # digest of the parameters that another replica reduces, which shares them: must be equal
    used: tuple[int, ...] = ()  # which parameters took part, BITS of them in each number
    lane_weights: tuple[float, ...] = ()  # of the lanes that this rank ran, and zeros

    @property
    def broken(self) -> bool:
        """Whether sums with this rank's part are not what they should be."""
        return self.abort is not Abort.NO or self.late > 0

    def encode(self) -> list[int]:
        return [
            _ONE if self.broken else 0,
            self.reduction,
            self.unused,
            self.late,
            self.mode.value,
            *_bits(self.weight),
            self.micros,
            self.ready,
            int(self.graph_changed),
            self.abort.value,
            int(self.skipped),
            self.votes.value,
            self.calls,
            self.state,
            self.signature,
            self.not_finite,
            self.lane_step,
            self.lane_shape,
            int(self.several),
            self.asleep,
            *self.used,
            *_bits(*self.lane_weights),
        ]

    @classmethod
    def decode(cls, row: Sequence[int], lanes: int = 0) -> "StepReport":
        """`lanes`: how many columns at the end are weights of lanes."""
        middle = len(row) - lanes
        return cls(
            reduction=row[1],
            unused=row[2],
            late=row[3],
            mode=Mode(row[4]),
            weight=_floats(row[5:6])[0],
            micros=row[6],
            ready=row[7],
            graph_changed=bool(row[8]),
            abort=Abort(row[9]),
            skipped=bool(row[10]),
            votes=Vote(row[11]),
            calls=row[12],
            state=row[13],
            signature=row[14],
            not_finite=row[15],
            lane_step=row[16],
            lane_shape=row[17],
            several=bool(row[18]),
            asleep=row[19],
            used=tuple(row[HEADER:middle]),
            lane_weights=_floats(row[middle:]),
        )


_ONE = int.from_bytes(struct.pack("<f", 1.0), "little")


def _bits(*values: float) -> tuple[int, ...]:
    return struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values))


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(words)}d", struct.pack(f"<{len(words)}q", *words))


def used_bits(slots: Sequence[GradSlot]) -> tuple[int, ...]:
    """Which of the parameters took part."""
    found = [0] * -(-len(slots) // BITS)
    for index, slot in enumerate(slots):
        if slot.used:
            found[index // BITS] |= 1 << index % BITS
    return tuple(found)


def all_used(count: int) -> tuple[int, ...]:
    """The same, if all of `count` parameters took part."""
    whole, rest = divmod(count, BITS)
    return ((1 << BITS) - 1,) * whole + (((1 << rest) - 1,) if rest else ())


def count_uses(reports: Sequence[StepReport], count: int) -> list[int]:
    """On how many ranks each of `count` parameters took part."""
    return [sum(row.used[index // BITS] >> index % BITS & 1 for row in reports) for index in range(count)]


def check_together(rows: Sequence[StepReport]) -> None:
    """Raise, on every rank alike, when the reports of all ranks cannot belong together."""
    if any(row.abort is not Abort.NO for row in rows):
        return
    counts = [row.reduction for row in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatch(
            f"ranks reduced gradients of different steps: {_by_rank(counts)} reductions so far; run the same number of "
            f"backward passes, and the same no_sync() blocks, on every rank"
        )
    if len({row.calls for row in rows}) > 1:
        raise CollectiveMismatch(
            f"internal error: bucket schedules diverged between ranks ({_by_rank([f'{r.calls:x}' for r in rows])}), so "
            f"gradients of different parameters may have been added up; please report this"
        )
    if len({row.asleep for row in rows}) > 1:
        raise CollectiveMismatch(
            "replicas share parameters, which the one that was called last reduces, and ranks have called them in "
            "different orders, so their gradients do not belong together; call these replicas in one order on all ranks"
        )
    _check_lanes(rows)
    modes = {row.mode for row in rows}
    if Mode.MIXED in modes or {Mode.PLAIN, Mode.WEIGHTED} <= modes:
        raise CollectiveMismatch(
            f"some backwards of this step ran inside weight() and some outside ({_by_rank([r.mode.name for r in rows])}"
            f"); put every micro of a step, on every rank, inside weight()"
        )
    _warn_of_uneven_micros(rows)


def _check_lanes(rows: Sequence[StepReport]) -> None:
    steps = [row.lane_step for row in rows]
    if len(set(steps)) > 1:
        raise CollectiveMismatch(
            f"ranks run lanes of different steps ({_by_rank(steps)}), so their random numbers do not belong together; "
            f"give model.lanes(micros, step) the same step on every rank"
        )


def _warn_of_uneven_micros(rows: Sequence[StepReport]) -> None:
    micros = [row.micros for row in rows]
    if rows[0].mode is Mode.PLAIN and len({count for count in micros if count}) > 1:
        logger.warning(
            "ranks ran different numbers of backwards for one reduction (%s), so their batches count differently in "
            "the mean; use the same no_sync() blocks on every rank, or weight()",
            _by_rank(micros),
        )


def aborted_error(rows: Sequence[StepReport], consequence: str = "") -> BackwardAborted:
    """What ranks are told when a rank had no gradients. `consequence`: what became of the step, if it is over."""
    ranks = [rank for rank, row in enumerate(rows) if row.abort is not Abort.NO]
    listed = ", ".join(str(rank) for rank in ranks)
    threads = any(row.abort is Abort.THREADS for row in rows)
    why = "met a second backward of the same replica, on another thread," if threads else "ended with an exception"
    advice = "run the backwards of a replica one after another" if threads else "see that rank's own error"
    then = consequence or "so there are no gradients for this step on any rank"
    return BackwardAborted(
        f"the backward {why} on rank {listed}, {then}; {advice}, then skip the step or stop on all ranks", ranks=ranks
    )


def skipped_error(rows: Sequence[StepReport], step: str) -> CollectiveMismatch:
    """A rank has called skip_batch() where the others could not hear of it in time."""
    listed = ", ".join(str(rank) for rank, row in enumerate(rows) if row.skipped)
    return CollectiveMismatch(
        f"rank {listed} called skip_batch() in {step}, but on this transport the others divide by all ranks unless "
        f"microbatches are weighted, and their last update did; run every backward inside model.weight(n)"
    )


def graph_error(rows: Sequence[StepReport]) -> GraphChanged:
    """What the ranks whose own graph is unchanged are told."""
    listed = ", ".join(str(rank) for rank, row in enumerate(rows) if row.graph_changed)
    return GraphChanged(
        f"Your training graph has changed in this iteration on rank {listed}, which is not compatible with "
        f"static_graph=True; see that rank's own error for the parameters"
    )


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def reduce_late(slots: Sequence[GradSlot], group: Group, scale: float) -> None:
    """Reduce what nested backwards delivered after the buckets had left, and add it. All ranks call it, or none."""
    transport = group.transport
    flags = torch.tensor([slot.late for slot in slots], dtype=torch.int32, device="cpu")
    group.wait(transport.all_reduce(flags), "the list of late gradients")
    for slot, flag in zip(slots, flags.tolist(), strict=True):
        if not flag:
            continue
        grad, extra = slot.param.grad, torch.zeros_like(slot.view)  # equal dtype on all ranks, whatever the gradient's
        if grad is not None and scale != 0.0:  # not a product: see Bucket._collect_one
            extra = extra + grad * scale if slot.meta.sparse else extra.add_(grad, alpha=scale)
        group.wait(transport.all_reduce(extra), f"the late gradient of {slot.meta.name}")
        slot.param.grad = None
        if slot.meta.sparse:
            slot.bucket.flat = slot.bucket.flat + extra
        else:
            slot.view.add_(extra)


def unused_error(slots: Sequence[GradSlot], rows: Sequence[StepReport]) -> UnusedParameters:
    """The same error for every rank: which parameters took no part, and where."""
    lines = []
    for index, slot in enumerate(slots):
        ranks = [rank for rank, row in enumerate(rows) if not row.used[index // BITS] >> index % BITS & 1]
        if ranks:
            lines.append(f"  {slot.meta.name}: {_where(ranks, len(rows))}")
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
