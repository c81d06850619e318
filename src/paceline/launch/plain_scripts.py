"""Ranks of scripts that do not use paceline's class. They note nothing, so their progress is unknown; what can be seen
is whether Python runs in them, what CPU time they use, and at which line they have stopped.

Without --hang-timeout they are never ended, and a rank in which no Python runs is reported. With it, it is a hang if
some rank is in a collective, and no rank has done anything for that long. At fault are ranks in which no Python runs
(native code holds the GIL), or else those that are not in a collective. While no rank is in a collective no rank waits,
and a script may take as long as it needs.
"""

from collections.abc import Mapping, Sequence

from paceline.launch.lines import name_ranks
from paceline.launch.tracebacks import own_line
from paceline.launch.watchdog import FROZE, GAP_S, HOLDS_GIL, IDLE_SHARE, LATE_BETWEEN_S, MOVED, Hang, is_silent
from paceline.process_status import ProcessStatus

# Frames of Python code that waits for other ranks: torch's collectives, and a backward that reduces gradients.
_WAITS_IN = ("/torch/distributed/", "/torch/autograd/graph.py")


class PlainScripts:
    """Observations of such ranks. `timeout_s` is that of --hang-timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._looked_at = 0.0
        self._since = 0.0  # since when all ranks have done nothing, and the launcher has watched without a gap
        self._before: dict[int, ProcessStatus] = {}  # their usage at that time
        self._named: dict[int, float] = {}  # the beats after which ranks were reported as silent

    def forget(self, rank: int) -> None:
        """Another process is about to be this rank."""
        self._before.pop(rank, None)
        self._named.pop(rank, None)

    def look(
        self,
        now: float,
        statuses: Mapping[int, ProcessStatus],
        beats: Mapping[int, float],
        rests: Mapping[int, Sequence[str]],
    ) -> Hang | None:
        """Update from the kernel and the ranks; return those that hang, if any do. `rests`: the lines at which ranks
        have stopped; empty for those that run."""
        silent = [rank for rank in statuses if is_silent(beats.get(rank, 0.0), now)]
        busy = any(self._is_busy(rank, one, now) for rank, one in statuses.items() if rank not in silent)
        if busy or now - self._looked_at > GAP_S:
            self._since, self._before = now, dict(statuses)
        self._looked_at = now
        waits = [rank for rank in sorted(statuses) if rank not in silent and _waits(rests.get(rank, ()))]
        if not self._timeout_s or not waits or now - self._since <= self._timeout_s:
            return None
        culprits = silent or [rank for rank in statuses if rank not in waits] or waits
        lines = [f"{name_ranks([rank])} in {own_line(rests[rank])}" for rank in sorted(statuses) if rests.get(rank)]
        waited = f"no rank has done anything for {now - self._since:.0f} s (limit {self._timeout_s:g} s)"
        return Hang(tuple(sorted(culprits)), HOLDS_GIL if silent else FROZE, f"{waited}: {', '.join(lines)}", -1)

    def silent(self, now: float, beats: Mapping[int, float]) -> list[str]:
        """Messages about ranks in which no Python runs, once for each."""
        said = []
        for rank, beat in beats.items():
            if beat and now - beat > LATE_BETWEEN_S and self._named.get(rank) != beat:
                self._named[rank] = beat
                waited = f"{now - beat:.0f} s"
                said.append(
                    f"rank {rank} has run no Python for {waited}: native code holds the interpreter's lock (GIL)"
                )
        return said

    def _is_busy(self, rank: int, status: ProcessStatus, now: float) -> bool:
        if (before := self._before.get(rank)) is None:
            return True
        used_s = status.cpu_s - before.cpu_s  # the kernel counts in hundredths of a second
        return used_s > IDLE_SHARE * max(1.0, now - self._since) or status.moved - before.moved >= MOVED


def _waits(stack: Sequence[str]) -> bool:
    return any(part in line for line in stack for part in _WAITS_IN)
