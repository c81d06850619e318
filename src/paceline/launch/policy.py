"""What happens when a rank fails: the part of supervision that differs between plain and elastic jobs."""

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from paceline.launch.failure import End, follows, root_cause
from paceline.launch.job import JobFailure, Listener
from paceline.launch.reports import Mark
from paceline.launch.tracebacks import cut
from paceline.launch.watchdog import Hang
from paceline.rank_report import FAILING

# After one failure, others may follow for the same reason; after a rank that failed because of a peer, the peer's own
# failure must follow.
SAME_S = 0.5
BETTER_CAUSE_S = 3.0
MOST_OF_AN_ERROR = 200


class Supervisor(Protocol):
    """The operations that a policy may request. Ranks are identified by their slots."""

    listener: Listener

    def start(self, rank: int, member: int | None = None) -> None:
        """Start a process in a slot that has none."""

    def tell(self, rank: int, line: bytes) -> None:
        """Write a line to a member."""

    def end(self, rank: int, now: float, within_s: float) -> None:
        """Ask one process to end, and kill it after a while."""

    def abort(self, ranks: Collection[int], now: float, within_s: float) -> None:
        """Make processes dump their threads' stacks and abort, and kill them after a while."""

    def stop(self, now: float, number: int) -> None:
        """Ask all processes to end by a signal, and kill them after the job's shutdown timeout."""

    def step_of(self, rank: int) -> int:
        """The last step that a process has noted."""

    def has_begun(self, rank: int) -> bool:
        """Whether a process has noted that it trains, and not only that it is starting or waiting."""

    def pass_on(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a non-terminating signal to some processes, or to all."""


class Policy(Protocol):
    """Decides what happens. After `stopping` it no longer ends or starts processes."""

    def begin(self, now: float) -> None:
        """Start the processes."""

    def reported(self, rank: int, kind: str, fields: Mapping[str, Any], now: float) -> bool:
        """A process has reported something. Returns True if the report was for the policy only."""

    def ended(self, end: End, now: float) -> None:
        """A process has ended."""

    def watched(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        """The running processes that the watchdog may blame; None while it is off."""

    def hung(self, hang: Hang, now: float) -> None:
        """The watchdog has found ranks that make no progress."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def notified(self, number: int) -> None:
        """The launcher got a non-terminating signal: forward it to ranks that can handle it."""

    def stopping(self, now: float) -> None:
        """All processes are about to be asked to end."""

    def count(self, ends: Sequence[End]) -> list[End]:
        """The process exits that decide how the job ended."""

    def failure(self, ends: Sequence[End]) -> JobFailure | None:
        """Why the job failed, if it did."""

    @property
    def is_final(self) -> bool:
        """Whether a restart of all ranks would end in the same way."""


class AllOrNothing:
    """The ranks of a plain job need each other: when one fails, all are ended."""

    is_final = False

    def __init__(self, supervisor: Supervisor, ranks: int) -> None:
        self._supervisor, self._ranks = supervisor, ranks
        self._decide_at: float | None = None  # when to stop waiting for more failures
        self._hang: Hang | None = None
        self._ends: list[End] = []
        self._failing: dict[int, tuple[float, str]] = {}  # until when they may take to end, and why they do
        self._told: set[str] = set()
        self._stopping = False

    def begin(self, now: float) -> None:
        for rank in range(self._ranks):
            self._supervisor.start(rank)

    def reported(self, rank: int, kind: str, fields: Mapping[str, Any], now: float) -> bool:
        if kind == FAILING:
            self._failing[rank] = now + SAME_S, cut(str(fields.get("error")), MOST_OF_AN_ERROR)
        return kind == FAILING

    def ended(self, end: End, now: float) -> None:
        self._ends.append(end)
        self._failing.pop(end.rank, None)
        if end.failed:
            self._decide_by(now + (BETTER_CAUSE_S if follows(end) else SAME_S))

    def watched(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        return marks if self._decide_at is None else None

    def hung(self, hang: Hang, now: float) -> None:
        self._hang = hang
        self._supervisor.abort(hang.ranks, now, BETTER_CAUSE_S)
        self._decide_by(now + BETTER_CAUSE_S)  # sooner if they have exited

    def tick(self, now: float) -> None:
        for rank in [rank for rank, (due, _) in self._failing.items() if now >= due]:
            error = self._failing.pop(rank)[1]
            if error not in self._told:  # many ranks may have the same
                self._told.add(error)
                self._supervisor.listener.note(f"rank {rank} raised {error}, and is about to end")
        if self._decide_at is not None and now >= self._decide_at and not self._stopping:
            if (
                failure := self.failure(self._ends)
            ) is not None:  # report it first, because the ranks may take long to end
                self._supervisor.listener.note(f"{failure}; the other ranks are asked to end")
            self._supervisor.stop(now, signal.SIGTERM)

    def notified(self, number: int) -> None:
        self._supervisor.pass_on(number)

    def stopping(self, now: float) -> None:
        self._stopping = True

    def count(self, ends: Sequence[End]) -> list[End]:
        return list(ends)

    def failure(self, ends: Sequence[End]) -> JobFailure | None:
        return root_cause(ends, self._hang)

    def _decide_by(self, due: float) -> None:
        self._decide_at = due if self._decide_at is None else min(self._decide_at, due)
