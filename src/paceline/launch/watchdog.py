"""Finds ranks that run but make no progress: by their notes, their CPU time, and learned times.

A rank hangs when it has noted nothing for longer than its phase allows:

    forward, backward, optimizer, data      the limit: --hang-timeout, or else learned from the steps seen
    between steps, in the script's code    twice --hang-timeout, or else CEILING_S; IDLE_S for one that does nothing
    evaluation, checkpoint                  CEILING_S, or --hang-timeout if that is longer
    waiting for other ranks                 never, while any rank does something else, which is then checked. When
                                            all ranks wait, they wait for each other: the limit
    not begun, done, nothing ever noted     never: such scripts may take any time

Without --hang-timeout the second and third apply only while another rank waits: a script may take all the time it
needs after its training. In them, reading or writing files counts as progress.

A rank that was stopped (SIGSTOP) counts as hung after STOPPED_S, whatever it was doing; if all were stopped, only
those that use paceline's class. So does, after twice that, one that does nothing because a process it started was
stopped: by then a Loader has reported its workers.

Every note restarts the clock, so a slow evaluation or save in many parts is not ended.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.launch.reports import Mark
from paceline.phase import Phase
from paceline.process_status import ProcessStatus

# A step may take FACTOR times the median of the steps seen, or LONGEST times the longest of them, but at least FLOOR_S:
# file systems and compilers may be slow. Before any step was seen, and in rare, long phases, it may take CEILING_S.
FACTOR = 10.0
LONGEST = 3.0
FLOOR_S = 20.0
CEILING_S = 600.0
LEARN_FROM = 3
REMEMBER = 101
# How much longer than a step the code between steps may take, if the user has set the limit of a step.
BETWEEN = 2.0
# A stopped process does nothing at all, so a short limit suffices; a pause of two seconds is allowed.
STOPPED_S = 4.0
# A process that does nothing between steps, while others wait for it: this long.
IDLE_S = 180.0
# Reading or writing this many bytes is progress.
MOVED = 1 << 20
# A rank whose threads have not run for this long holds the interpreter's lock in native code.
SILENT_S = 1.7
# A rank is reported as late, but not ended, when another waits and it has noted nothing for the longest of these: some
# steps; seconds, and more of them in phases that may take long. Before there were steps, LATE_FIRST_S.
LATE_STEPS = 5.0
LATE_S = 3.0
LATE_BETWEEN_S = 15.0
LATE_FIRST_S = 10.0
# A share of one core over the time watched, below which a process does nothing.
IDLE_SHARE = 0.02
# If the launcher itself did not run for this long, the ranks may not have run either.
GAP_S = 2.0
_UNHURRIED = (Phase.CHECKPOINT, Phase.LOAD, Phase.EVALUATE)
_FREE = (Phase.IDLE, Phase.DONE)
_OFTEN_LAST = (Phase.BETWEEN, *_UNHURRIED)
_WHERE = {
    Phase.BETWEEN: "between steps",
    Phase.WAITING: "waiting for other ranks",
    Phase.CHECKPOINT: "in a checkpoint",
    Phase.LOAD: "loading a checkpoint",
    Phase.EVALUATE: "in an evaluation",
}


class Hang(NamedTuple):
    """Ranks that make no progress, and in what way."""

    ranks: tuple[int, ...]
    how: str  # continues "rank 1 "
    reason: str
    step: int


FROZE, BUSY = "froze", "is busy but making no progress"
HOLDS_GIL = "hangs in native code that holds the interpreter's lock (GIL)"


def _no_children(_: int) -> list[int]:
    return []


class _RankHistory:
    """The observations of one rank."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.cpu_s = 0.0  # the CPU time it had used when it noted that
        self.moved, self.moved_at = 0, 0.0  # the bytes that it had read and written, and when they were noticed
        self.stopped_since: float | None = None
        self.step_at: tuple[int, float] | None = None
        self.named: Mark | None = None  # the note at which it was reported as late


class Watchdog:
    """Checks all ranks about twice a second. `timeout_s` replaces the learned time."""

    def __init__(self, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        self._seen = {rank: _RankHistory() for rank in ranks}
        self._timeout_s = timeout_s
        self._steps: deque[float] = deque(maxlen=REMEMBER)
        self._longest_s = 0.0
        self._looked_at: float | None = None
        self._woke_at = 0.0  # since when the launcher has run without a gap

    def forget(self, rank: int) -> None:
        """Another process becomes this rank."""
        self._seen[rank] = _RankHistory()

    def patience_s(self, phase: Phase = Phase.FORWARD, *, idle: bool = False) -> float:
        """How long a rank may go without a note in `phase`."""
        if phase in _UNHURRIED:
            return max(CEILING_S, self._timeout_s or 0.0)
        if self._timeout_s is not None:
            return self._timeout_s * (BETWEEN if phase is Phase.BETWEEN else 1.0)
        if len(self._steps) < LEARN_FROM or (phase is Phase.BETWEEN and not idle):
            return CEILING_S
        learned = max(FACTOR * self.step_s(), LONGEST * self._longest_s)
        return min(CEILING_S, max(IDLE_S if phase is Phase.BETWEEN else FLOOR_S, learned))

    def step_s(self) -> float:
        """The median of the steps seen; 0 before there are any."""
        return sorted(self._steps)[len(self._steps) // 2] if len(self._steps) >= LEARN_FROM else 0.0

    def shortfall(self, grace_s: float) -> str:
        """A sentence, if a step takes longer than the time that ranks have to end theirs, save and leave."""
        if (step_s := self.step_s()) <= grace_s:
            return ""
        return (
            f"a step takes {step_s:.3g} s, and ranks have {grace_s:.3g} s to end theirs, save and leave, so they may "
            f"be killed before they have saved: --shutdown-timeout gives them more time"
        )

    def look(
        self,
        now: float,
        marks: Mapping[int, Mark],
        statuses: Mapping[int, ProcessStatus],
        beats: Mapping[int, float] | None = None,
        stopped_children: Callable[[int], list[int]] = _no_children,
    ) -> Hang | None:
        """Update from the ranks' notes and the kernel; return the ranks that hang, if any do.

        `beats` is when Python last ran in each rank, 0 if unknown; `stopped_children` returns the stopped processes
        that a rank has started.
        """
        slept = self._looked_at is not None and now - self._looked_at > GAP_S
        self._looked_at = now
        self._woke_at = now if slept else self._woke_at
        for rank, mark in marks.items():
            self._take_in(rank, mark, statuses[rank], now, slept)
        noted = [rank for rank, mark in marks.items() if mark.noted]
        if (hang := self._stopped(now, marks, statuses, noted, stopped_children)) is not None:
            return hang
        deadlock = all(mark.phase is Phase.WAITING for mark in marks.values())
        needed = self._timeout_s is not None or any(mark.phase is Phase.WAITING for mark in marks.values())
        free = {*_FREE, *(() if deadlock else (Phase.WAITING,)), *(() if needed else _OFTEN_LAST)}
        watched = [rank for rank in noted if marks[rank].phase not in free]
        stale = [rank for rank in watched if self._age_s(rank, now) > self._limit_s(rank, marks, statuses, now)]
        return self._name_culprits(stale, marks, statuses, now, beats or {}) if stale else None

    def _stopped(
        self,
        now: float,
        marks: Mapping[int, Mark],
        statuses: Mapping[int, ProcessStatus],
        noted: list[int],
        stopped_children: Callable[[int], list[int]],
    ) -> Hang | None:
        """Ranks that were stopped, or whose child processes were."""
        stopped = tuple(rank for rank in marks if self._has_stopped(rank, now))
        if self._timeout_s is None and len(stopped) == len(marks):  # the user has paused the job
            stopped = tuple(rank for rank in stopped if rank in noted)
        if stopped:
            waited = now - (self._seen[stopped[0]].stopped_since or now)
            return Hang(stopped, FROZE, f"stopped for {waited:.0f} s (process state T)", marks[stopped[0]].step)
        for rank in noted:
            idle = marks[rank].phase not in (*_FREE, Phase.WAITING) and self._used(rank, statuses, now) <= IDLE_SHARE
            if idle and self._age_s(rank, now) >= 2 * STOPPED_S and (children := stopped_children(rank)):
                named = " and ".join(f"pid {child}" for child in children[:3])
                reason = (
                    f"no progress for {self._age_s(rank, now):.0f} s {_where(marks[rank])}, because processes that it "
                    f"has started were stopped (state T), such as DataLoader workers: {named}"
                )
                return Hang((rank,), FROZE, reason, marks[rank].step)
        return None

    def late(
        self, now: float, marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus]
    ) -> list[tuple[int, str]]:
        """Ranks that others wait for, and since when, once for each: they are reported long before any is ended."""
        waiting = [rank for rank, mark in marks.items() if mark.phase is Phase.WAITING]
        found = []
        for rank, mark in marks.items():
            seen = self._seen[rank]
            if not waiting or not mark.noted or mark.phase in (*_FREE, Phase.WAITING) or seen.named == mark:
                continue
            usual_s = LATE_STEPS * self.step_s() if self.step_s() else LATE_FIRST_S
            limit_s = max(usual_s, LATE_BETWEEN_S if mark.phase in _OFTEN_LAST else LATE_S)
            if (age_s := self._age_s(rank, now)) >= limit_s:
                seen.named = mark
                used = self._used(rank, statuses, now)
                found.append(
                    (rank, f"for {age_s:.0f} s {_where(mark)}, at step {mark.step}, using {used:.0%} of a core")
                )
        return found

    def _limit_s(
        self, rank: int, marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus], now: float
    ) -> float:
        return self.patience_s(marks[rank].phase, idle=self._used(rank, statuses, now) <= IDLE_SHARE)

    def _used(self, rank: int, statuses: Mapping[int, ProcessStatus], now: float) -> float:
        """The share of a core that it has used since its last note."""
        return (statuses[rank].cpu_s - self._seen[rank].cpu_s) / max(0.001, self._age_s(rank, now))

    def _age_s(self, rank: int, now: float) -> float:
        """How long a rank has made no visible progress."""
        seen = self._seen[rank]
        at = 0.0 if seen.mark is None else seen.mark.at
        return now - max(at, self._woke_at, seen.moved_at)

    def _take_in(self, rank: int, mark: Mark, status: ProcessStatus, now: float, slept: bool) -> None:
        seen = self._seen[rank]
        if mark != seen.mark or slept:
            self._learn(seen, mark, slept)
            seen.mark, seen.cpu_s, seen.moved, seen.moved_at = mark, status.cpu_s, status.moved, 0.0
        elif mark.phase in _OFTEN_LAST and status.moved - seen.moved >= MOVED:
            seen.moved, seen.moved_at, seen.cpu_s = status.moved, now, status.cpu_s
        if not status.stopped or slept:
            seen.stopped_since = None
        elif seen.stopped_since is None:
            seen.stopped_since = now

    def _learn(self, seen: _RankHistory, mark: Mark, slept: bool) -> None:
        if not mark.noted or slept or mark.phase in _FREE:
            seen.step_at = None
            return
        if seen.step_at is None or mark.step < seen.step_at[0]:
            seen.step_at = mark.step, mark.at
        elif mark.step > seen.step_at[0]:
            taken = (mark.at - seen.step_at[1]) / (mark.step - seen.step_at[0])
            self._steps.append(taken)
            self._longest_s = max(self._longest_s, taken)
            seen.step_at = mark.step, mark.at

    def _has_stopped(self, rank: int, now: float) -> bool:
        since = self._seen[rank].stopped_since
        limit = STOPPED_S if self._timeout_s is None else min(STOPPED_S, self._timeout_s)
        return since is not None and now - since >= limit

    def _name_culprits(
        self,
        stale: list[int],
        marks: Mapping[int, Mark],
        statuses: Mapping[int, ProcessStatus],
        now: float,
        beats: Mapping[int, float],
    ) -> Hang:
        # Ranks wait for the one that is furthest behind.
        behind = min(marks[rank][:2][::-1] for rank in stale)
        culprits = tuple(rank for rank in stale if marks[rank][:2][::-1] == behind)
        mark = marks[culprits[0]]
        waited = self._age_s(culprits[0], now)
        share = max(self._used(rank, statuses, now) for rank in culprits)
        limit_s = self._limit_s(culprits[0], marks, statuses, now)
        reason = (
            f"no progress for {waited:.0f} s {_where(mark)} (limit {limit_s:.0f} s), using {share:.0%} of a CPU core"
        )
        silent = all(is_silent(beats.get(rank, 0.0), now) for rank in culprits)
        return Hang(culprits, HOLDS_GIL if silent else BUSY if share > IDLE_SHARE else FROZE, reason, mark.step)


def is_silent(beat: float, now: float) -> bool:
    """Whether Python has stopped running in a rank."""
    return beat > 0 and now - beat > SILENT_S


def _where(mark: Mark) -> str:
    return _WHERE.get(mark.phase, f"in {mark.phase.name.lower()}")
