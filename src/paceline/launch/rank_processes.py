"""The launcher's end of the reaper: starts ranks, sends them signals, and receives their exits."""

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import Malformed
from paceline.launch import reaper
from paceline.process_status import ProcessStatus, oom_kills, read_status, signal_name, stopped_children
from paceline.typed_json import read_json

REAPER_S = 10.0


@dataclass(frozen=True)
class RankStarted:
    """The process of a rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankExited:
    """The process of a rank has exited, or could not be started, with the reason in `never`."""

    rank: int
    code: int = 0
    killed_by: int = 0
    never: str = ""
    with_reaper: bool = False  # the kernel killed it because the reaper had died
    out_of_memory: bool = False
    lost: str = ""  # its machine does not answer, so its state is unknown

    @property
    def how(self) -> str:
        """Continues "rank 1 "."""
        if self.never:
            return f"could not be started: {self.never}"
        return f"was killed by {signal_name(self.killed_by)}" if self.killed_by else f"exited with {self.code}"


_EVENT: Any = RankStarted | RankExited


class RankProcesses:
    """The processes of all ranks. None of them outlives `close`, or the death of this process.

    `streams` are the reaper's standard streams, as subprocess.Popen takes them.
    """

    def __init__(self, streams: int | None = None) -> None:
        self.living: dict[int, int] = {}  # rank → process id, 0 while it is not known
        self.unkillable: list[int] = []  # processes of the ranks that were left when the reaper had died
        self.reaper_died = False
        self._partial = b""
        self._oom_kills = oom_kills()
        self._control, theirs = socket.socketpair()
        # Isolated, and without site packages: a broken environment of the ranks does not break the reaper.
        command = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(theirs.fileno())]
        with theirs:
            self._reaper = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=streams,
                stdout=streams,
                stderr=streams,
            )

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._control.fileno()

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        out: int,
        err: int,
        folder: Path | None = None,
        named: Mapping[str, int] | None = None,
        stdin: bool = False,
    ) -> None:
        """Start a rank that writes to the descriptors `out` and `err`, which this process may close afterwards.

        It also inherits the descriptors in `named`, whose numbers are in environment variables of these names. With
        `stdin` it reads the reaper's standard input.
        """
        named = named or {}
        self.living[rank] = 0
        self._send(
            [out, err, *named.values()],
            rank=rank,
            command=list(command),
            environment=dict(environment),
            folder=None if folder is None else str(folder),
            named=list(named),
            stdin=stdin,
        )

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all of them. SIGKILL ends the whole process group of a rank."""
        self._send(signal=int(number), rank=rank)

    def abort(self, rank: int) -> None:
        """Make a rank dump its threads' stacks and abort."""
        # On this signal faulthandler writes where each thread is. A core dump, which may take minutes, is not wanted.
        with contextlib.suppress(OSError):
            resource.prlimit(self.living[rank], resource.RLIMIT_CORE, (0, 0))
        self.signal(signal.SIGABRT, rank)
        self.signal(signal.SIGCONT, rank)

    def status(self, rank: int) -> ProcessStatus:
        """The kernel's status of a rank."""
        return read_status(self.living.get(rank, 0))

    def stopped_children(self, rank: int) -> list[int]:
        """The processes that a rank has started and that were stopped by a signal."""
        return stopped_children(self.living.get(rank, 0))

    def events(self) -> list[RankStarted | RankExited]:
        """What has happened since the last call. When the reaper has died, all ranks have exited."""
        found: list[RankStarted | RankExited] = []
        while not self.reaper_died:
            try:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except OSError:
                data = b""
            self.reaper_died = not data
            *lines, self._partial = (self._partial + data).split(b"\n")
            found += map(self._event, lines)
        living, self.living = self.living, {}
        if living:
            # The kernel kills the ranks, but not their descendants, which must not interfere with the next attempt.
            self.unkillable = reaper.end_sessions([pid for pid in living.values() if pid])
        return [*found, *(RankExited(rank, killed_by=signal.SIGKILL, with_reaper=True) for rank in living)]

    def _event(self, line: bytes) -> RankStarted | RankExited:
        event: RankStarted | RankExited = read_json(_EVENT, line, "an event of the reaper")
        if event.rank not in self.living:
            raise Malformed(f"expected an event of a living rank, got {event}")
        if isinstance(event, RankStarted):
            self.living[event.rank] = event.pid
            return event
        del self.living[event.rank]
        if event.killed_by == signal.SIGKILL and oom_kills() > self._oom_kills:
            self._oom_kills += 1
            event = replace(event, out_of_memory=True)
        return event

    def _send(self, descriptors: Sequence[int] = (), **message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reaper has died: `events` says so
            sent = socket.send_fds(self._control, [line], descriptors)
            self._control.sendall(line[sent:])

    def close(self) -> None:
        """Make the reaper kill all remaining processes of the ranks, and wait until it has exited. Idempotent."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            self._reaper.wait(REAPER_S)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
        self._control.close()
