"""Finds ranks that run but make no progress: by what they noted, by the CPU time they use, and by learned times.

A rank hangs when it has noted nothing for longer than its phase allows:

    forward, backward, optimizer, data      the limit: --hang-timeout, or else learned from the steps seen
    between steps, in code we cannot see    twice --hang-timeout, or else CEILING_S
    evaluation, checkpoint                  CEILING_S, or --hang-timeout if that is longer
    waiting for other ranks                 never, as long as any rank does something else, which is then judged. When
                                            all ranks wait, they wait for each other: the limit
    not begun, done, nothing ever noted     never: other people's scripts may be as slow as they like

Without --hang-timeout the second and third are judged only while another rank waits: a script may take all the time it
needs for what it does when its training is over.

A rank that was stopped (SIGSTOP) hangs after STOPPED_S whatever it did, if it ever noted anything or --hang-timeout was
given. Every note starts the clock anew, so a slow evaluation or save of many parts is not touched.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.launch.reports import Mark
from paceline.phase import Phase
from paceline.process_status import ProcessStatus

# A step may take FACTOR times the median of the steps seen, or LONGEST times the longest of them, but at least FLOOR_S:
# file systems and compilers take their time. Before steps were seen, and in phases that come seldom and last long, it
# may take CEILING_S.
FACTOR = 10.0
LONGEST = 3.0
FLOOR_S = 20.0
CEILING_S = 600.0
LEARN_FROM = 3
REMEMBER = 101
# How much longer than a step the code between steps may take, where the user has said how long a step may take.
BETWEEN = 2.0
# A stopped process does nothing at all, so less patience is needed; a pause of two seconds is forgiven.
STOPPED_S = 4.0
# A share of one core over the time watched, below which a process does nothing.
IDLE_SHARE = 0.02
# When the launcher itself was not run for this long, the ranks perhaps were not either.
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
    """Ranks that make no progress, and how."""

    ranks: tuple[int, ...]
    busy: bool  # whether they use a CPU core meanwhile
    reason: str
    step: int


class _RankHistory:
    """What was seen of one rank."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.cpu_s = 0.0  # the CPU time it had used when it noted that
        self.stopped_since: float | None = None
        self.step_at: tuple[int, float] | None = None


class Watchdog:
    """Looks at all ranks about twice a second. `timeout_s` replaces the learned time."""

    def __init__(self, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        self._seen = {rank: _RankHistory() for rank in ranks}
        self._timeout_s = timeout_s
        self._steps: deque[float] = deque(maxlen=REMEMBER)
        self._longest_s = 0.0
        self._looked_at: float | None = None
        self._woke_at = 0.0  # since when the launcher has run without a gap

    def patience_s(self, phase: Phase = Phase.FORWARD) -> float:
        """How long a rank may note nothing in `phase`."""
        if phase in _UNHURRIED:
            return max(CEILING_S, self._timeout_s or 0.0)
        if self._timeout_s is not None:
            return self._timeout_s * (BETWEEN if phase is Phase.BETWEEN else 1.0)
        if phase is Phase.BETWEEN or len(self._steps) < LEARN_FROM:
            return CEILING_S
        learned = max(FACTOR * sorted(self._steps)[len(self._steps) // 2], LONGEST * self._longest_s)
        return min(CEILING_S, max(FLOOR_S, learned))

    def look(self, now: float, marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus]) -> Hang | None:
        """Take in what ranks noted and what the kernel says of them; name those that hang, if any do."""
        slept = self._looked_at is not None and now - self._looked_at > GAP_S
        self._looked_at = now
        self._woke_at = now if slept else self._woke_at
        for rank, mark in marks.items():
            self._take_in(rank, mark, statuses[rank], now, slept)
        noted = [rank for rank, mark in marks.items() if mark.noted]
        seen = noted if self._timeout_s is None else marks
        stopped = tuple(rank for rank in seen if self._has_stopped(rank, now))
        if stopped:
            waited = now - (self._seen[stopped[0]].stopped_since or now)
            return Hang(stopped, False, f"stopped for {waited:.0f} s (process state T)", marks[stopped[0]].step)
        deadlock = all(mark.phase is Phase.WAITING for mark in marks.values())
        needed = self._timeout_s is not None or any(mark.phase is Phase.WAITING for mark in marks.values())
        free = {*_FREE, *(() if deadlock else (Phase.WAITING,)), *(() if needed else _OFTEN_LAST)}
        judged = [rank for rank in noted if marks[rank].phase not in free]
        stale = [rank for rank in judged if self._age_s(marks[rank], now) > self.patience_s(marks[rank].phase)]
        return self._name_culprits(stale, marks, statuses, now) if stale else None

    def _age_s(self, mark: Mark, now: float) -> float:
        """For how long a rank has noted nothing else, as far as it could."""
        return now - max(mark.at, self._woke_at)

    def _take_in(self, rank: int, mark: Mark, status: ProcessStatus, now: float, slept: bool) -> None:
        seen = self._seen[rank]
        if mark != seen.mark or slept:
            self._learn(seen, mark, slept)
            seen.mark, seen.cpu_s = mark, status.cpu_s
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
        self, stale: list[int], marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus], now: float
    ) -> Hang:
        # Ranks wait for the one that is furthest behind.
        behind = min(marks[rank][:2][::-1] for rank in stale)
        culprits = tuple(rank for rank in stale if marks[rank][:2][::-1] == behind)
        mark = marks[culprits[0]]
        waited = self._age_s(mark, now)
        used = {rank: statuses[rank].cpu_s - self._seen[rank].cpu_s for rank in culprits}
        share = max(used[rank] / max(0.001, self._age_s(marks[rank], now)) for rank in culprits)
        where = _WHERE.get(mark.phase, f"in {mark.phase.name.lower()}")
        limit_s = self.patience_s(mark.phase)
        reason = f"no progress for {waited:.0f} s {where} (limit {limit_s:.0f} s), using {share:.0%} of a CPU core"
        return Hang(culprits, share > IDLE_SHARE, reason, mark.step)
