"""The reaper: a process between a launcher and its ranks that starts them, reports how they end, and adopts and ends
all their descendants.

A program of its own that uses the standard library alone (`rank_processes.py` is the launcher's end). It reads JSON
lines from a socket: ranks to start, with their descriptors, and signals to forward. When the launcher closes the
socket, or dies, the reaper kills every process that descends from it, including those that left their session: it is
their subreaper, so they cannot escape it. When the reaper itself dies, the kernel kills the ranks, and `end_sessions`
ends what the ranks had started.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND_EXIT = 127
KILL_S = 5.0
SESSIONS_S = 10.0
MAX_DESCRIPTORS = 16  # in one message


class _Process(NamedTuple):
    """One line of the process table."""

    pid: int
    state: str
    parent: int
    session: int


class Reaper:
    """The ranks of one machine in one attempt."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._pid = os.getpid()
        self._launcher = os.getppid()
        self._started: list[subprocess.Popen[bytes]] = []
        self._living: dict[int, int] = {}  # process id → rank
        self._partial = b""
        self._descriptors: list[int] = []  # received, in the order of the ranks that will get them

    def serve(self) -> None:
        """Work until the launcher has ended."""
        wake, wakened = os.pipe()
        ready_to_read = select.poll()  # not select(), which knows no descriptor above 1023
        ready_to_read.register(self._control, select.POLLIN)
        ready_to_read.register(wake, select.POLLIN)
        os.set_blocking(wakened, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakened)
        try:
            while True:
                ready = [descriptor for descriptor, _ in ready_to_read.poll(1000)]
                if wake in ready:
                    os.read(wake, 4096)
                self._reap()
                if self._control.fileno() in ready and not self._receive():
                    return
                if os.getppid() != self._launcher:  # it is dead, though a child that it forked holds the socket open
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the launcher has ended, so there is no one to report to
        finally:
            self._kill_descendants()

    def _receive(self) -> bool:
        data, descriptors, *_ = socket.recv_fds(self._control, 1 << 16, MAX_DESCRIPTORS)
        self._descriptors += descriptors
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "command" in message:
                self._start(**message)
            else:
                self._forward(message["signal"], message["rank"])
        return bool(data)

    def _start(
        self,
        rank: int,
        command: list[str],
        environment: dict[str, str],
        folder: str | None,
        named: list[str],
        stdin: bool,
    ) -> None:
        own, self._descriptors = self._descriptors[: 2 + len(named)], self._descriptors[2 + len(named) :]
        out, err, *passed = own
        for name, descriptor in zip(named, passed, strict=True):
            # With its inode, so that a program that inherits only the variable does not mistake another file for it.
            environment[name] = f"{descriptor}:{os.fstat(descriptor).st_ino}"
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=None if stdin else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=passed,
                start_new_session=True,
                preexec_fn=self._die_with_reaper,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._send(rank=rank, never=str(error), code=NOT_FOUND_EXIT)
        else:
            self._started.append(child)
            self._living[child.pid] = rank
            self._send(rank=rank, pid=child.pid)
        for descriptor in own:
            os.close(descriptor)

    def _die_with_reaper(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:  # the reaper died before the request
            os._exit(1)

    def _forward(self, number: int, rank: int | None) -> None:
        for pid, living in self._living.items():
            if rank in (None, living):
                if number == signal.SIGKILL:
                    _kill_group(pid)
                else:
                    # Only the rank itself: loader workers must outlive the request to save and leave. One that has
                    # become another user, as sudo does, cannot be signalled; that is no reason to end the others.
                    with contextlib.suppress(PermissionError):
                        os.kill(pid, number)

    def _reap(self) -> None:
        """Report ranks that ended, and reap orphans."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            rank = self._living.pop(found.si_pid, None)
            if rank is not None:
                _kill_group(found.si_pid)  # while its number cannot be reused
            os.waitpid(found.si_pid, 0)
            if rank is not None:
                died = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._send(rank=rank, **{"killed_by" if died else "code": found.si_status})

    def _send(self, **message: object) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _kill_descendants(self) -> None:
        self._control.close()
        _kill_until_gone(self._descendants, KILL_S)

    def _descendants(self) -> list[int]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        return _descendants(self._pid)


def end_sessions(leaders: Collection[int]) -> list[int]:
    """Kill all processes in the sessions of `leaders`, wait for their end, and return those that did not end.

    For a launcher whose reaper was killed. A rank leads a session of its own, and the number of a session is not reused
    while a process is in it.
    """

    def members() -> list[int]:
        return [found.pid for found in _processes() if found.session in leaders and found.state not in ("Z", "X")]

    return _kill_until_gone(members, SESSIONS_S)


def _kill_until_gone(find: Callable[[], list[int]], within_s: float) -> list[int]:
    """Kill what `find` returns until it returns nothing: processes forked meanwhile are found in the next round."""
    until = time.monotonic() + within_s
    while (left := find()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return left


def _descendants(root: int) -> list[int]:
    parents = {process.pid: process.parent for process in _processes()}
    found = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {root})


def _processes() -> Iterator[_Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command comes second, in brackets, and may itself contain spaces and brackets.
                state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                yield _Process(int(entry.name), state, int(parent), int(session))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher forwards its signals itself. Handlers, unlike ignoring, end at exec.
        signal.signal(_number, lambda *_: None)
    Reaper(socket.socket(fileno=int(sys.argv[1]))).serve()
