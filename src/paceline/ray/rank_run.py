"""One process of a rank on the machine of its agent: its reaper, its pipes, and its notes."""

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.launch.rank_processes import RankExited, RankProcesses
from paceline.launch.reports import ProgressBoard
from paceline.rank_report import MEMBERSHIP_NAME, PROGRESS_NAME, REPORT_NAME

CHUNK = 1 << 16
LAST_READS = 256
RANK = 0  # of the one process, to its reaper
THIS_PYTHON = ""  # in the place of the program: the interpreter that the agent runs in

# An agent's events about its rank, in order: the number of the process, what it is, and more about it. The kinds are
# "started" with its process id, "out", "err" and "report" with bytes, "noted" with its part of the progress board,
# "status" with a ProcessStatus as a tuple and its stopped children, and "exited" with the fields of a RankExited.
Event = tuple[int, str, Any]


class RankRun:
    """From the start of the process until nothing is left of it."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        self.number = number
        self.over = False
        self._noted = b""
        self._status: tuple[Any, ...] = ()
        self._untold = b""
        slot = environment.get("LOCAL_RANK", "0")
        self._slot = int(slot)
        self._pipes: dict[str, int] = {}
        program = sys.executable if command[0] == THIS_PYTHON else command[0]
        with contextlib.ExitStack() as undo:
            self._board = undo.enter_context(contextlib.closing(ProgressBoard(self._slot + 1)))
            undo.callback(self._close_pipes)
            self._processes = undo.enter_context(contextlib.closing(RankProcesses()))
            with self._open_pipes() as theirs:
                self._processes.start(
                    RANK,
                    [program, *command[1:]],
                    {**os.environ, **environment},
                    out=theirs["out"],
                    err=theirs["err"],
                    folder=Path(folder) if Path(folder).is_dir() else Path.cwd(),
                    named={
                        REPORT_NAME: theirs["report"],
                        PROGRESS_NAME: self._board.descriptor,
                        MEMBERSHIP_NAME: theirs["membership"],
                    },
                )
            self._undo = undo.pop_all()

    @contextlib.contextmanager
    def _open_pipes(self) -> Any:
        theirs: dict[str, int] = {}
        try:
            for name in ("out", "err", "report"):
                self._pipes[name], theirs[name] = os.pipe()
            theirs["membership"], self._pipes["membership"] = os.pipe()
            for descriptor in self._pipes.values():
                os.set_blocking(descriptor, False)
            yield theirs
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)

    def _close_pipes(self) -> None:
        for descriptor in self._pipes.values():
            os.close(descriptor)
        self._pipes.clear()

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to read."""
        return [self._processes.fileno(), *(pipe for name, pipe in self._pipes.items() if name != "membership")]

    def read(self, ready: Collection[int]) -> list[Event]:
        """The events in those of its descriptors that are ready."""
        self._flush()
        found: list[Event] = [
            (self.number, name, data)
            for name, pipe in list(self._pipes.items())
            if pipe in ready and (data := self._read(name))
        ]
        if self._processes.fileno() in ready:
            for event in self._processes.events():
                if isinstance(event, RankExited):
                    return [*found, *self._end(event)]
                found.append((self.number, "started", event.pid))
        return found

    def _read(self, name: str) -> bytes:
        try:
            data = os.read(self._pipes[name], CHUNK)
        except BlockingIOError:
            return b""
        if not data:  # end of the pipe
            os.close(self._pipes.pop(name))
        return data

    def notes(self) -> list[Event]:
        """Its notes, if they are new, and the kernel's status of it."""
        if self.over:
            return []
        noted = self._board.copy(self._slot)
        status = tuple(self._processes.status(RANK)), self._processes.stopped_children(RANK)
        found: list[Event] = []
        if noted != self._noted:
            self._noted = noted
            found.append((self.number, "noted", noted))
        if status != self._status:
            self._status = status
            found.append((self.number, "status", status))
        return found

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._processes.signal(number, RANK)

    def abort(self) -> None:
        """Make it dump its threads' stacks and abort."""
        self._processes.abort(RANK)

    def tell(self, data: bytes) -> None:
        """Write to it as to a member of an elastic job."""
        self._untold += data
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._untold and "membership" in self._pipes:
                try:
                    self._untold = self._untold[os.write(self._pipes["membership"], self._untold) :]
                except BrokenPipeError:
                    os.close(self._pipes.pop("membership"))

    def close(self) -> list[Event]:
        """Kill it, if it is alive, with all its descendants."""
        return [] if self.over else self._end(RankExited(RANK, killed_by=signal.SIGKILL))

    def _end(self, exited: RankExited) -> list[Event]:
        self._processes.close()  # kills what it may have started
        rest: list[Event] = []
        for name in [name for name in self._pipes if name != "membership"]:
            for _ in range(LAST_READS):
                if name not in self._pipes or not (data := self._read(name)):
                    break
                rest.append((self.number, name, data))
        rest += self.notes()
        self.over = True
        self._undo.close()
        return [*rest, (self.number, "exited", asdict(exited))]
