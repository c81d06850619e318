"""The launcher's end of one rank: its pipes, its log, its last words."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.errors import UsageError
from paceline.launch.failure import End
from paceline.launch.lines import Lines
from paceline.launch.tracebacks import begins, is_whole
from paceline.progress import ProgressBoard
from paceline.tell import TellReader, describe_descriptor

CHUNK = 1 << 16
REMEMBERED_LINES = 400
# A rank whose traceback is followed by other words has caught it. Dying takes a while on a busy machine, and is
# accompanied by warnings of torch and by what Python says about chained exceptions.
HOLD_S = 10.0
PAUSE_S = 0.3
AFTERWORDS = (" ", "[", "During handling", "The above exception", "Exception ignored", "terminate called")


@dataclass
class Ends:
    """One end of each of a rank's pipes."""

    out: int = -1
    err: int = -1
    told: int = -1

    def __iter__(self) -> Iterator[int]:
        return iter((self.out, self.err, self.told))


class Rank:
    """One rank as its launcher sees it. `inner` ends stay here, `outer` ends go to the rank."""

    def __init__(self, local: int, rank: int, log: Path) -> None:
        self.local = local
        self.rank = rank
        self.pid = 0
        self.end: End | None = None
        self.cried_at: float | None = None  # when it last began a traceback
        self.inner, self.outer = Ends(), Ends()
        self.out_lines, self.err_lines = Lines(rank), Lines(rank)
        self.problem = ""  # why its log is not complete
        self.tells = TellReader()
        self.tell_name = ""
        self._held: list[str] = []
        self._held_at = 0.0
        self._log_path = log
        self._log: BinaryIO | None = None
        self._last_out: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self._last_err: deque[str] = deque(maxlen=REMEMBERED_LINES)

    def open(self, attempt: int) -> list[int]:
        """Make the pipes and open the log; return what the rank must inherit."""
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._log_path.open("ab" if attempt else "wb", buffering=0)
        except OSError as error:
            raise UsageError(f"the log {self._log_path} cannot be written: {error.strerror or error}") from error
        if attempt:
            self._write_log(f"--- restart {attempt} ---\n".encode())
        for name in ("out", "err", "told"):
            inner, outer = os.pipe()
            os.set_blocking(inner, False)
            setattr(self.inner, name, inner)
            setattr(self.outer, name, outer)
        self.tell_name = describe_descriptor(self.outer.told)
        return list(self.outer)

    def hand_over(self) -> None:
        """The keeper has the outer ends now."""
        for descriptor in self.outer:
            os.close(descriptor)
        self.outer = Ends()

    def read(self, stream: str) -> bytes | None:
        """What has come: None when nothing has, empty when nothing ever will again."""
        try:
            return os.read(getattr(self.inner, stream), CHUNK)
        except BlockingIOError:
            return None

    def note_out(self, data: bytes | None, now: float) -> list[str]:
        """Take in standard output; return the lines it completes."""
        lines = self._take(self.out_lines, data, now)
        self._last_out.extend(lines)
        return lines

    def note_err(self, data: bytes | None, now: float) -> list[str]:
        """Take in standard error; return the lines to be shown now.

        A traceback is held back: when the rank ends by it, the failure shows it, once for all ranks.
        """
        lines = self._take(self.err_lines, data, now)
        self._last_err.extend(lines)
        start = next((number for number, line in enumerate(lines) if begins(line)), None)
        if start is not None:
            self.cried_at = now
        elif now - self._held_at > PAUSE_S and is_whole(self._held) and _goes_on(lines):
            return [*self._let_go(), *lines]
        if not self._held and start is None:
            return lines
        shown = 0 if self._held else start
        self._held += lines[shown:]
        self._held_at = now if lines else self._held_at
        return lines[:shown]

    def release(self, now: float) -> list[str]:
        """Held lines of a rank that goes on after all, or has ended well."""
        if self.end is not None:
            return [] if self.end.exit_code else self._let_go()
        return self._let_go() if self._held and now - self._held_at > HOLD_S else []

    def late(self, now: float) -> list[str]:
        """Lines of standard error that have waited long enough for their end, or for that of the rank."""
        idle = [] if self._held else self.err_lines.idle(now)
        self._last_err.extend(idle)
        return [*idle, *self.release(now)]

    def _let_go(self) -> list[str]:
        held, self._held = self._held, []
        self.cried_at = None  # it has caught what it cried about
        return held

    def _take(self, lines: Lines, data: bytes | None, now: float) -> list[str]:
        if not data:
            return []
        self._write_log(data)
        return lines.feed(data, now)

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            # A full disk is no reason to end a training.
            self._log.close()
            self._log = None
            self.problem = f"{self._log_path} is not written any more: {error.strerror or error}"

    def tail(self) -> tuple[str, ...]:
        """Its last words: of standard error, or of standard output when there it said nothing."""
        return tuple(self._last_err) or tuple(self._last_out)

    def step(self, board: ProgressBoard) -> int | None:
        """The step it was in, if it ever noted one."""
        mark = board.read(self.local)
        return mark.step if mark.noted else None

    def close(self) -> None:
        for descriptor in (*self.inner, *self.outer):
            if descriptor >= 0:
                os.close(descriptor)
        if self._log is not None:
            self._log.close()


def _goes_on(lines: list[str]) -> bool:
    return any(line and not line.startswith(AFTERWORDS) for line in lines)
