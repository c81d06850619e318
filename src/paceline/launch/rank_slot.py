"""The launcher's view of one rank: what it writes, its log, and how it ended."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.errors import UsageError
from paceline.launch.failure import End
from paceline.launch.lines import Lines
from paceline.launch.reports import ReportReader
from paceline.launch.tracebacks import begins, is_whole

CHUNK = 1 << 16
# A rank whose traceback is followed by other output has caught it. Dying takes a while on a busy machine, and is
# accompanied by warnings of torch and by what Python says about chained exceptions.
HOLD_S = 10.0
PAUSE_S = 0.3
AFTER_TRACEBACK = (" ", "[", "During handling", "The above exception", "Exception ignored", "terminate called")


class RankErrors(Lines):
    """Standard error of a rank. It holds tracebacks back: if the rank ends with one, the failure shows it once."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.traceback_at: float | None = None  # when the rank last began to write one that it has not caught
        self.hold_s = HOLD_S  # how long to hold one back: not at all after a good end, and forever after a failure
        self._held: list[str] = []
        self._held_at = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        lines = super().feed(data, now)
        begun = next((number for number, line in enumerate(lines) if begins(line)), len(lines))
        if begun < len(lines):
            self.traceback_at = now
        elif now - self._held_at > PAUSE_S and is_whole(self._held) and _goes_on(lines):
            return [*self._release(), *lines]
        shown = 0 if self._held else begun
        if lines:
            self._held += lines[shown:]
            self._held_at = now
        return lines[:shown]

    def idle(self, now: float) -> list[str]:
        if not self._held:
            return super().idle(now)
        return self._release() if now - self._held_at >= self.hold_s else []

    def _release(self) -> list[str]:
        held, self._held, self.traceback_at = self._held, [], None
        return held


def _goes_on(lines: list[str]) -> bool:
    return any(line and not line.startswith(AFTER_TRACEBACK) for line in lines)


class RankSlot:
    """One rank: the pipes it writes to, its log, and how it ended. `note` receives what is wrong with the log."""

    def __init__(self, rank: int, log: Path, note: Callable[[str], None]) -> None:
        self.rank = rank
        self.end: End | None = None
        self.out, self.err, self.reports = Lines(rank), RankErrors(rank), ReportReader()
        self.pipes: dict[str, int] = {}  # our ends of "out", "err" and "report"
        self._log_path = log
        self._log: BinaryIO | None = None
        self._note = note

    def open_log(self, attempt: int) -> None:
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._log_path.open("ab" if attempt else "wb", buffering=0)
        except OSError as error:
            raise UsageError(
                f"the log {self._log_path} cannot be written: {error.strerror or error}; choose another folder, for "
                f"instance with --log-dir"
            ) from error
        if attempt:
            self._write_log(f"--- restart {attempt} ---\n".encode())

    @contextmanager
    def open_pipes(self) -> Iterator[dict[str, int]]:
        """Make the pipes. Inside, the rank's ends are open, for the rank to be started with them."""
        theirs: dict[str, int] = {}
        try:
            for name in ("out", "err", "report"):
                self.pipes[name], theirs[name] = os.pipe()
                os.set_blocking(self.pipes[name], False)
            yield theirs
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)

    def read(self, pipe: str) -> bytes | None:
        """What has come: None when nothing has, empty when nothing ever will again. The log gets it too."""
        try:
            data = os.read(self.pipes[pipe], CHUNK)
        except BlockingIOError:
            return None
        if pipe != "report":
            self._write_log(data)
        return data

    def tail(self) -> tuple[str, ...]:
        """Its last lines of standard error, or of standard output if it wrote no errors."""
        return tuple(self.err.last) or tuple(self.out.last)

    def close(self) -> None:
        for descriptor in self.pipes.values():
            os.close(descriptor)
        if self._log is not None:
            self._log.close()

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            # A full disk is no reason to end a training.
            self._log.close()
            self._log = None
            self._note(f"{self._log_path} is no longer written: {error.strerror or error}")
