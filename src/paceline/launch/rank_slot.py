"""The launcher's view of one rank: its output, its log, and how it ended."""

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
from paceline.stored.directory import open_to_write

CHUNK = 1 << 16
# A rank whose traceback is followed by other output has caught it. Exiting takes a while on a busy machine, and is
# accompanied by warnings of torch and by what Python says about chained exceptions.
HOLD_S = 10.0
PAUSE_S = 0.3
MOST_HELD = 5000  # lines; beyond that the output is no traceback
AFTER_TRACEBACK = (" ", "[", "During handling", "The above exception", "Exception ignored", "terminate called")


class RankErrors(Lines):
    """Standard error of a rank. It holds tracebacks back: if the rank ends with one, the failure shows it once."""

    def __init__(self, rank: int, member: bool = False) -> None:
        super().__init__(rank, member)
        self.traceback_at: float | None = None  # when the rank last began to write one that it has not caught
        self.hold_s = HOLD_S  # how long to hold one back: not at all after a good end, and forever after a failure
        self._held: list[str] = []
        self._held_at = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        lines = super().feed(data, now)
        begun = next((number for number, line in enumerate(lines) if begins(line)), len(lines))
        if begun < len(lines):
            self.traceback_at = now
        elif (now - self._held_at > PAUSE_S and is_whole(self._held) and _goes_on(lines)) or len(
            self._held
        ) > MOST_HELD:
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


class RankLog:
    """The log of all output of one slot. It may hold secrets, so only the user can read it. `note` receives errors
    about it."""

    def __init__(self, path: Path, again: bool, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO | None = os.fdopen(open_to_write(path, append=again), "wb", buffering=0)
        except OSError as error:
            raise UsageError(
                f"the log {path} cannot be written: {error.strerror or error}; choose another folder, for instance "
                f"with --log-dir"
            ) from error

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            while data:  # a nearly full disk takes part of it first
                data = data[self._file.write(data) :]
        except OSError as error:
            # A full disk must not end the training.
            self.close()
            self._note(f"{self._path} is no longer written: {error.strerror or error}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RankSlot:
    """One process of one rank: the pipes between it and its launcher, and how it ended.

    `member` is its number in an elastic job, where others may run in the slot before and after it.
    """

    def __init__(self, rank: int, log: RankLog, member: int | None = None) -> None:
        self.rank = rank
        self.member = member
        self.end: End | None = None
        self.asked_at: float | None = None  # when it alone was asked to end
        is_member = member is not None
        self.out, self.err, self.reports = Lines(rank, is_member), RankErrors(rank, is_member), ReportReader()
        self.pipes: dict[str, int] = {}  # the launcher's ends of "out", "err" and "report"
        self._log = log
        self._membership: int | None = None  # the launcher's end of the pipe to a member
        self._untold = b""

    @contextmanager
    def open_pipes(self) -> Iterator[dict[str, int]]:
        """Make the pipes. Within the context the rank's ends are open, to be passed to the rank."""
        theirs: dict[str, int] = {}
        try:
            for name in ("out", "err", "report"):
                self.pipes[name], theirs[name] = os.pipe()
                os.set_blocking(self.pipes[name], False)
            if self.member is not None:
                theirs["membership"], self._membership = os.pipe()
                os.set_blocking(self._membership, False)
            yield theirs
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)

    def read(self, pipe: str) -> bytes | None:
        """Read available data: None if there is none yet, empty at the end of the pipe. It is also logged."""
        try:
            data = os.read(self.pipes[pipe], CHUNK)
        except BlockingIOError:
            return None
        if pipe != "report":
            self._log.write(data)
        return data

    def tell(self, line: bytes = b"") -> None:
        """Write a line to a member; data that does not fit into the pipe now is written by the next call."""
        self._untold += line
        while self._untold and self._membership is not None:
            try:
                self._untold = self._untold[os.write(self._membership, self._untold) :]
            except BlockingIOError:
                return
            except BrokenPipeError:  # its exit is about to be noticed
                self._untold = b""

    def tail(self) -> tuple[str, ...]:
        """Its last lines of standard error, or of standard output if it wrote no errors."""
        return tuple(self.err.last) or tuple(self.out.last)

    def close(self) -> None:
        for descriptor in self.pipes.values():
            os.close(descriptor)
        self.pipes.clear()
        if self._membership is not None:
            os.close(self._membership)
            self._membership = None
