"""What is done when a rank fails: the part of supervision that differs between a plain and an elastic job."""

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from paceline.launch.failure import End, follows, root_cause
from paceline.launch.job import JobFailure, Listener
from paceline.launch.reports import Mark
from paceline.launch.tracebacks import cut
from paceline.launch.watchdog import Hang
from paceline.rank_report import FAILING

# After a rank failed, others may fail for the same reason; after one that failed because of a peer, the peer's own
# failure must be on its way.
SAME_S = 0.5
BETTER_CAUSE_S = 3.0
MOST_OF_AN_ERROR = 200


class Supervisor(Protocol):
    """What a policy may have done. Ranks are named by their slots."""

    listener: Listener

    def start(self, rank: int, member: int | None = None) -> None:
        """Start a process in a slot that has none."""

    def tell(self, rank: int, line: bytes) -> None:
        """Write a line to a member."""

    def end(self, rank: int, now: float, within_s: float) -> None:
        """Ask one process to end, and kill it after a while."""

    def abort(self, ranks: Collection[int], now: float, within_s: float) -> None:
        """Have processes write where their threads are and die, and kill them after a while."""

    def stop(self, now: float, number: int) -> None:
        """Ask all processes to end by a signal, and kill them after the time that the job gives them."""

    def step_of(self, rank: int) -> int:
        """The step that a process has noted last."""

    def has_begun(self, rank: int) -> bool:
        """Whether a process has noted that it trains, and not only that it starts, or waits for others."""

    def pass_on(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal that ends nothing to some processes, or to all of them."""


class Policy(Protocol):
    """Decides. After `stopping` it ends and starts nothing any more."""

    def begin(self, now: float) -> None:
        """Start what is to run."""

    def reported(self, rank: int, kind: str, fields: Mapping[str, Any], now: float) -> bool:
        """A process has reported something. Returns whether it was for the policy alone."""

    def ended(self, end: End, now: float) -> None:
        """A process has ended."""

    def judged(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        """Of the processes that run, those that others wait for; None while the watchdog is not to look at all."""

    def hung(self, hang: Hang, now: float) -> None:
        """The watchdog has found ranks that make no progress."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def notified(self, number: int) -> None:
        """The launcher got a signal that ends nothing: ranks that can take it are to have it."""

    def stopping(self, now: float) -> None:
        """All processes are about to be asked to end."""

    def count(self, ends: Sequence[End]) -> list[End]:
        """Of how processes ended, what decides how the job did."""

    def failure(self, ends: Sequence[End]) -> JobFailure | None:
        """Why the job failed, if it did."""

    @property
    def is_final(self) -> bool:
        """Whether starting all ranks again would end in the same way."""


class AllOrNothing:
    """The ranks of a plain job need each other: when one fails, all are ended."""

    is_final = False

    def __init__(self, supervisor: Supervisor, ranks: int) -> None:
        self._supervisor, self._ranks = supervisor, ranks
        self._decide_at: float | None = None  # when waiting for more failures is over
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

    def judged(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        return marks if self._decide_at is None else None

    def hung(self, hang: Hang, now: float) -> None:
        self._hang = hang
        self._supervisor.abort(hang.ranks, now, BETTER_CAUSE_S)
        self._decide_by(now + BETTER_CAUSE_S)  # sooner, when they have exited

    def tick(self, now: float) -> None:
        for rank in [rank for rank, (due, _) in self._failing.items() if now >= due]:
            error = self._failing.pop(rank)[1]
            if error not in self._told:  # many ranks may have the same
                self._told.add(error)
                self._supervisor.listener.note(f"rank {rank} raised {error}, and is about to end")
        if self._decide_at is not None and now >= self._decide_at and not self._stopping:
            if (
                failure := self.failure(self._ends)
            ) is not None:  # it is told before they end: they may take their time
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
