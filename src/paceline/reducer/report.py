"""The step report that ranks exchange once per reduction, this rank's part in it, and how it is sent.

The reports of all ranks are gathered by one small collective beside the last buckets. They are not part of one,
because a communication hook may compress it, its dtype may not hold them, and only when backward has ended is it known
whether it ended well. `settle.py` acts on them; how they are sent if streams order collectives is in
`device_reports.py`.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.group import Group
from paceline.collectives.protocols import Transport, Work
from paceline.collectives.wait import EventWork
from paceline.collectives.watcher import Watcher
from paceline.errors import GraphChanged, MessageDamaged
from paceline.reducer.autograd import pending_reducers
from paceline.reducer.used_params import all_used, count_unused, digest_owned_elsewhere, used_bits

if TYPE_CHECKING:
    from paceline.reducer.device_reports import DeviceReports
    from paceline.reducer.reducer import Reducer
    from paceline.reducer.step_observer import Findings


class Vote(Flag):
    """What a rank asks of all of them, once per reduction."""

    NOTHING = 0
    STOP = 1  # end the run after this step
    SAVE = 2  # write a checkpoint after this step, and continue
    EXHAUSTED = 4  # this rank has no more data
    REGROUP = 8  # end this generation after this step: members wait to join (`paceline.elastic`)
    PREEMPTED = 16  # a declared `Preemption` got a signal on this rank


class Mode(Enum):
    """The kind of backwards that a rank has run since the last reduction."""

    NOTHING = 0
    PLAIN = 1
    WEIGHTED = 2
    MIXED = 3

    def and_then(self, other: "Mode") -> "Mode":
        return other if self in (Mode.NOTHING, other) else Mode.MIXED


class Abort(Enum):
    """Why a rank has no usable gradients for a reduction that the others wait for."""

    NO = 0
    EXCEPTION = 1  # its backward ended with an exception
    THREADS = 2  # two of its threads ran a backward at once
    DAMAGED = 3  # a message from another rank was damaged


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one rank. Every field but the last two is one column of 64 bits, in this order."""

    reduction: int  # number of reductions this rank has begun: must be equal
    unused: int  # parameters that took no part
    late: int  # gradients that arrived after their bucket's launch
    mode: Mode  # plain and weighted backwards must not meet
    weight: float  # sum of the weights of this rank's microbatches
    microbatches: int = 0  # backwards since the last reduction
    ready: int = 0  # gradients that came from a backward
    graph_changed: bool = False  # though it was declared static
    abort: Abort = Abort.NO
    skipped: bool = False  # this rank is left out of the mean
    votes: Vote = Vote.NOTHING
    launch_digest: int = 0  # of all buckets that were ever launched: must be equal
    state: int = 0  # see reducer/step_observer.py for this one and the next two
    signature: int = 0
    not_finite: int = 0
    lane_step: int = 0  # the step whose lanes run: must be equal
    lane_shape: int = 0  # see reducer/lane_shapes.py
    several: bool = False  # other replicas take part in the same backward: see reducer/autograd.py
    owned_elsewhere: int = 0  # digest of the parameters that another replica reduces, which shares them: must be equal
    used: tuple[int, ...] = ()  # which parameters took part, see reducer/used_params.py
    lane_weights: tuple[float, ...] = ()  # of the lanes that this rank ran, and zeros

    @property
    def broken(self) -> bool:
        """Whether sums that include this rank's part are wrong."""
        return self.abort is not Abort.NO or self.late > 0

    def encode(self) -> list[int]:
        columns = [to_column(getattr(self, name)) for name, to_column, _ in _COLUMNS]
        return [_ONE if self.broken else 0, *columns, *self.used, *_to_bits(*self.lane_weights)]

    @classmethod
    def decode(cls, row: Sequence[int], lanes: int = 0) -> "StepReport":
        """`lanes`: how many columns at the end are weights of lanes."""
        try:
            values: list[Any] = [read(value) for value, (_, _, read) in zip(row[1:HEADER], _COLUMNS, strict=True)]
        except ValueError as error:
            raise MessageDamaged(f"expected a step report, got {len(row)} invalid columns: {error}") from error
        middle = len(row) - lanes
        values += (tuple(row[HEADER:middle]), _from_bits(row[middle:]))
        return cls(*values)


def column_of(field: str) -> int:
    """The column of this field in a report. Its first column says that the rank's gradients are not to be used: a
    float32, 1.0 or 0.0, in the first half."""
    return 1 + [name for name, *_ in _COLUMNS].index(field)


def _to_bits(*values: float) -> tuple[int, ...]:
    return struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values))


def _from_bits(columns: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(columns)}d", struct.pack(f"<{len(columns)}q", *columns))


def _codec(kind: Any) -> tuple[Callable[[Any], int], Callable[[int], Any]]:
    """The conversions of a field of type `kind` to a column and back."""
    if kind is float:
        return lambda value: _to_bits(value)[0], lambda column: _from_bits((column,))[0]
    return (int, kind) if kind in (int, bool) else (lambda value: int(value.value), kind)


HEADER = len(fields(StepReport)) - 1  # columns before those of used parameters and of lanes
_COLUMNS = [(field.name, *_codec(field.type)) for field in fields(StepReport)[:-2]]
_ONE = int.from_bytes(struct.pack("<f", 1.0), "little")


@dataclass(eq=False, slots=True)
class PendingReports:
    """The reports of one reduction, being gathered. They may be read once `work` is complete."""

    number: int
    work: Work
    peek: Callable[[], list[StepReport]]
    release: Callable[[], None] = lambda: None
    on_device: torch.Tensor | None = None  # one row per rank, ordered after the collective on the current stream
    broken: torch.Tensor | None = None  # on the device, per rank: 1.0 if its gradients must not be used
    graph_error: GraphChanged | None = None  # of this rank
    gated: bool = False  # an optimizer was told, on the device, whether to take its step
    computed: Work | None = None  # on a device: done when this rank has computed all that it sent

    @property
    def what(self) -> str:
        return f"the reports of reduction {self.number}"

    def rows(self) -> list[StepReport]:
        """One report per rank. Their memory is reused."""
        found = self.peek()
        self.release()
        return found


class StepRole(Enum):
    """How this rank takes part in a reduction."""

    FULL = auto()  # with the gradients of its backwards
    EMPTY = auto()  # with zeros, and it keeps its own gradients: a rank without data inside join()
    SKIPPED = auto()  # contributes nothing, but gets the mean of the others
    ABORTED = auto()  # its backward failed: no rank has gradients of this step


class Contribution:
    """This rank's state of the current or next reduction. Each one begins with a new `Contribution`."""

    def __init__(self) -> None:
        self.role = StepRole.FULL
        self.abort = Abort.NO
        self.late = 0  # gradients that arrived after their bucket's launch
        self.unused = 0  # parameters that took no part here, if that matters
        self.graph_error: GraphChanged | None = None
        self.sent: PendingReports | None = None
        self.computed: EventWork | None = None  # done when the device has computed what is sent

    def report(self, reducer: "Reducer", found: "Findings") -> StepReport:
        """This rank's report of this reduction."""
        slots, weighting, shadow = reducer.bucket_set.slots, reducer.weighting, self.role is StepRole.EMPTY
        everything = len(reducer.ready_order) == len(slots)
        if self.role is StepRole.FULL and not (everything and reducer.graph.used_everything):
            self.graph_error = reducer.graph.compare(slots, static=reducer.settings.static_graph)
        self.unused = 0 if everything or not reducer.batch.counts(self.role) else count_unused(slots)
        return StepReport(
            reduction=reducer.reductions_begun,
            unused=self.unused,
            late=self.late,
            mode=weighting.mode,
            weight=weighting.total,
            microbatches=reducer.batch.microbatches,
            ready=len(reducer.ready_order),
            graph_changed=self.graph_error is not None,
            abort=self.abort,
            skipped=self.role is StepRole.SKIPPED,
            votes=reducer.reports.votes,
            launch_digest=reducer.schedule.launch_digest,
            # Inside join() the parameters of a rank without data are behind until it ends.
            state=found.state if isinstance(found.state, int) and not shadow else 0,
            signature=0 if shadow else found.signature,
            not_finite=found.not_finite if isinstance(found.not_finite, int) else 0,
            lane_step=reducer.batch.step,
            lane_shape=reducer.batch.shape_digest(),
            several=pending_reducers.of(reducer) is not None,
            owned_elsewhere=0 if everything else digest_owned_elsewhere(slots),
            used=all_used(len(slots)) if everything else used_bits(slots),
            lane_weights=reducer.batch.lane_weights(),
        )

    def mark_aborted(self, why: Abort) -> None:
        """No rank has gradients of this reduction: a backward of this rank has failed."""
        why = self.abort if self.abort is Abort.DAMAGED else why
        self.role, self.abort = StepRole.ABORTED, why


class ReportExchange:
    """Sends this rank's report of every reduction, and returns those of all ranks when they are due."""

    def __init__(self, group: Group, on_device: "DeviceReports | None") -> None:
        """`on_device`: sends them if streams order collectives."""
        self._group = group
        self._on_device = on_device
        self.votes = Vote.NOTHING  # of this rank, for the next reduction
        self.gathered_votes: list[Vote] = []  # of all ranks, in the last reduction whose reports were read
        self.unread: deque[PendingReports] = deque()  # being gathered, oldest first
        self.watcher = Watcher(group)

    def send(self, told: StepReport, found: "Findings", *, on_device: bool, computed: Work | None) -> PendingReports:
        """Send this rank's report. `computed`: done when the device has computed all that this rank has sent."""
        if on_device:
            assert self._on_device is not None
            sent = self._on_device.send(told, self._group.transport, found)
            sent.computed = computed
            self.watcher.watch(sent)
        else:
            sent = send_from_host(told, self._group.transport)
        self.votes = Vote.NOTHING
        return sent

    def read(
        self, mine: PendingReports, wait: Callable[[Work, str], None], *, later: bool
    ) -> Iterator[tuple[PendingReports, Sequence[StepReport]]]:
        """The reports that are due, oldest first. `later`: those of the newest reduction, `mine`, are not."""
        self.unread.append(mine)
        while len(self.unread) > later:
            found = self.unread.popleft()
            wait(found.work, found.what)
            yield found, found.rows()

    def raise_watcher_error(self) -> None:
        """Raise what the watcher has found since the last step. A CUDA graph that is captured has no events."""
        if self.watcher.error is not None:
            raise self.watcher.error
        if self._on_device is not None and torch.cuda.is_current_stream_capturing():
            self.watcher.forget()

    def start_over(self) -> None:
        """Reset for another set of ranks: the old reports will not be answered."""
        self.unread.clear()
        self.votes, self.gathered_votes = self.votes & ~Vote.REGROUP, []
        self.watcher.close()
        self.watcher = Watcher(self._group)


def send_from_host(report: StepReport, transport: Transport) -> PendingReports:
    encoded = torch.tensor(report.encode(), dtype=torch.int64, device="cpu")
    gathered = torch.empty(transport.size, len(encoded), dtype=torch.int64, device="cpu")
    work = transport.all_gather(gathered, encoded)
    lanes = len(report.lane_weights)

    def rows() -> list[StepReport]:
        return [StepReport.decode(row, lanes) for row in gathered.tolist()]

    return PendingReports(report.reduction, work, rows)
