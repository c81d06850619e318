"""The launcher's view of its ranks: their notes, the kernel's status of them, and the lines at which they have
stopped."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from paceline.launch.lines import name_ranks
from paceline.launch.plain_scripts import PlainScripts
from paceline.launch.rank_engine import Processes
from paceline.launch.reports import Mark, ProgressBoard
from paceline.launch.stragglers import Stragglers
from paceline.launch.tracebacks import own_line
from paceline.launch.watchdog import FROZE, STOPPED_S, Hang, Watchdog, is_silent
from paceline.phase import Phase
from paceline.process_status import ProcessStatus

Watched = Callable[[Mapping[int, Mark]], Mapping[int, Mark] | None]


class RankWatch:
    """Checks all ranks about twice a second, reports those that are late, and finds those that hang."""

    def __init__(
        self, ranks: Sequence[int], timeout_s: float | None, board: ProgressBoard, note: Callable[[str], None]
    ) -> None:
        self._watchdog = Watchdog(ranks, timeout_s)
        self._board = board
        self._note = note
        self._plain = PlainScripts(timeout_s)
        self._stragglers = Stragglers()
        self._rests: dict[int, tuple[float, list[str]]] = {}  # where ranks have stopped, and when they reported it
        self._bystander_stopped: dict[int, float] = {}  # since when a rank that no other waits for is stopped

    def on_report(self, rank: int, kind: str, fields: Mapping[str, Any]) -> None:
        """A rank has reported something, perhaps the line at which it has stopped."""
        if kind == "rests" and isinstance(stack := fields.get("stack"), list):
            self._rests[rank] = time.monotonic(), [str(line) for line in stack]

    def forget(self, rank: int) -> None:
        """Another process is about to be this rank."""
        self._board.clear(rank)
        self._watchdog.forget(rank)
        self._plain.forget(rank)
        self._rests.pop(rank, None)

    def look(self, now: float, processes: Processes, watched: Watched) -> Hang | None:
        """The ranks that hang, if any do; `watched` filters the running ranks that may be blamed."""
        living = [rank for rank, pid in processes.living.items() if pid]
        marks = watched({rank: self._board.read(rank) for rank in living})
        if marks is None:
            return None
        statuses = {rank: processes.status(rank) for rank in living}
        hang = self._look_at(now, processes, marks, statuses) if marks else None
        return hang or self._stopped_bystander(now, marks, statuses)

    def _stopped_bystander(
        self, now: float, marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus]
    ) -> Hang | None:
        """A rank that no other waits for, such as a spare, may take any time; but a stopped one is useless."""
        stopped = {rank for rank in statuses.keys() - marks.keys() if statuses[rank].stopped}
        if stopped == statuses.keys():  # the user has paused the job
            stopped = set()
        self._bystander_stopped = {rank: self._bystander_stopped.get(rank, now) for rank in stopped}
        for rank, since in self._bystander_stopped.items():
            if now - since >= STOPPED_S:
                reason = f"stopped for {now - since:.0f} s (process state T)"
                return Hang((rank,), FROZE, reason, self._board.read(rank).step)
        return None

    def _look_at(
        self, now: float, processes: Processes, marks: Mapping[int, Mark], statuses: Mapping[int, ProcessStatus]
    ) -> Hang | None:
        statuses = {rank: statuses[rank] for rank in marks}
        beats = {rank: self._board.beat(rank) for rank in marks}
        hang = self._watchdog.look(now, marks, statuses, beats, processes.stopped_children)
        if hang is None and not any(mark.noted for mark in marks.values()):
            hang = self._plain.look(now, statuses, beats, {rank: stack for rank, (_, stack) in self._rests.items()})
            for said in self._plain.silent(now, beats):
                self._note(said)
        if hang is not None:
            return hang
        for rank, how in self._watchdog.late(now, marks, statuses):
            others = [other for other, mark in marks.items() if mark.phase is Phase.WAITING]
            waiting = f"{name_ranks(others)} wait{'s' if len(others) == 1 else ''} for it"
            stopped = ": it is stopped (process state T)" if statuses[rank].stopped else ""
            silent = ": native code holds the interpreter's lock (GIL)" if is_silent(beats[rank], now) else ""
            where = stopped or silent or self._line(rank, marks[rank].at)
            self._note(f"rank {rank} makes no progress {how}{where}; {waiting}")
        return None

    def shortfall(self, grace_s: float) -> str:
        """The warning if ranks that have `grace_s` seconds to save and leave may need longer."""
        return self._watchdog.shortfall(grace_s)

    def tick(self, ranks: Collection[int], watched: Watched) -> None:
        """Sample what ranks are doing, to find a slow one."""
        if said := self._stragglers.look(watched({rank: self._board.read(rank) for rank in ranks}) or {}):
            self._note(said)

    def _line(self, rank: int, since: float) -> str:
        """The line at which the rank has stopped since then, if it has reported one."""
        at, stack = self._rests.get(rank, (0.0, []))
        return f", in {own_line(stack)}" if at > since and stack else ""
