"""The launcher's side of ranks' reports and notes."""

import json
import mmap
import os
from typing import Any, NamedTuple

from paceline.heartbeat import BEAT, BEAT_AT
from paceline.phase import NOTE, Phase
from paceline.rank_report import PROGRESS_SLOT

MAX_LINE = 1 << 20


class ReportReader:
    """The launcher's end: bytes of one rank in, whole reports out. Lines that are not reports are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[str, dict[str, Any]]]:
        """Add bytes; return the kind and the fields of each report that they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self._rest = b""
        found = [_parse(line) for line in lines]
        return [(report.pop("kind"), report) for report in found if isinstance(report.get("kind"), str)]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


class Mark(NamedTuple):
    """The last note of a rank, and its time on the monotonic clock. STARTING: there is none yet."""

    phase: Phase
    step: int
    at: float

    @property
    def noted(self) -> bool:
        return self.phase is not Phase.STARTING


class ProgressBoard:
    """The notes of all ranks. The launcher reads those of a rank whether that rank runs, hangs or is dead."""

    def __init__(self, ranks: int) -> None:
        # Anonymous memory: nothing is left when all its holders have ended.
        self.descriptor = os.memfd_create("paceline-progress")
        os.ftruncate(self.descriptor, ranks * PROGRESS_SLOT)
        self._memory = mmap.mmap(self.descriptor, ranks * PROGRESS_SLOT)

    def read(self, rank: int) -> Mark:
        """The last note of a rank."""
        stamp, step, phase = NOTE.unpack_from(self._memory, rank * PROGRESS_SLOT)
        if stamp == 0:
            return Mark(Phase.STARTING, -1, 0.0)
        # Another program may have written anything there.
        known = Phase(phase) if phase in Phase.__members__.values() else Phase.IDLE
        return Mark(known, step, stamp / 1e9)

    def beat(self, rank: int) -> float:
        """When Python last ran in a rank, on the monotonic clock; 0 if it has no heartbeat."""
        beat: int = BEAT.unpack_from(self._memory, rank * PROGRESS_SLOT + BEAT_AT)[0]
        return beat / 1e9

    def copy(self, rank: int) -> bytes:
        """All notes of a rank, for `paste_notes`."""
        return self._memory[rank * PROGRESS_SLOT : (rank + 1) * PROGRESS_SLOT]

    def clear(self, rank: int) -> None:
        """Forget what was noted: another process is about to be this rank."""
        self._memory[rank * PROGRESS_SLOT : (rank + 1) * PROGRESS_SLOT] = bytes(PROGRESS_SLOT)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def paste_notes(memory: mmap.mmap, rank: int, noted: bytes, clock_ns: int) -> None:
    """Copy a rank's notes from another machine to a board; `clock_ns` is added to that machine's clock."""
    stamp, step, phase = NOTE.unpack_from(noted)
    beat = BEAT.unpack_from(noted, BEAT_AT)[0]
    NOTE.pack_into(memory, rank * PROGRESS_SLOT, stamp + clock_ns if stamp else 0, step, phase)
    BEAT.pack_into(memory, rank * PROGRESS_SLOT + BEAT_AT, beat + clock_ns if beat else 0)
