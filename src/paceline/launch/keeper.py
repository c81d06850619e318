"""Stands between a launcher and its ranks: starts them, reports how they end, and leaves no process behind.

A program of its own, run with the standard library alone; it shares nothing with the rest of the package. It reads
JSON lines from a socket: first one for each rank to start, then signals to pass on. When the launcher closes the
socket, or dies in whatever way, it kills every process that descends from it, also those that left their session:
it is their subreaper, so they cannot get out from under it. When the keeper itself dies, the kernel kills the ranks.
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
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND_EXIT = 127
CLEAR_S = 5.0


class Keeper:
    """The ranks of one machine in one attempt."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._pid = os.getpid()
        self._launcher = os.getppid()
        self._started: list[subprocess.Popen[bytes]] = []
        self._living: dict[int, int] = {}  # process id → local rank
        self._rest = b""

    def serve(self) -> None:
        """Work until the launcher has gone."""
        wake, wakened = os.pipe()
        heard = select.poll()  # not select(), which knows no descriptor above 1023
        heard.register(self._control, select.POLLIN)
        heard.register(wake, select.POLLIN)
        os.set_blocking(wakened, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakened)
        try:
            while True:
                ready = [descriptor for descriptor, _ in heard.poll(1000)]
                if wake in ready:
                    os.read(wake, 4096)
                self._reap()
                if self._control.fileno() in ready and not self._listen():
                    return
                if os.getppid() != self._launcher:  # dead, though a child that it forked holds the socket open
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the launcher is gone, and with it the one to report to
        finally:
            self._clear()

    def _listen(self) -> bool:
        data = self._control.recv(1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word: dict[str, Any] = json.loads(line)
            if "command" in word:
                self._start(word)
            else:
                self._pass_on(word["signal"], word["rank"])
        return bool(data)

    def _start(self, word: dict[str, Any]) -> None:
        own = [word["out"], word["err"], *word["keep"]]
        try:
            child = subprocess.Popen(
                word["command"],
                env=word["environment"],
                cwd=word["folder"],
                stdin=None if word["stdin"] else subprocess.DEVNULL,
                stdout=word["out"],
                stderr=word["err"],
                pass_fds=word["keep"],
                start_new_session=True,
                preexec_fn=self._tie_to_keeper,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._say(rank=word["rank"], never=str(error), code=NOT_FOUND_EXIT)
        else:
            self._started.append(child)
            self._living[child.pid] = word["rank"]
            self._say(rank=word["rank"], pid=child.pid)
        for descriptor in own:
            if descriptor not in word["shared"]:
                os.close(descriptor)

    def _tie_to_keeper(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:  # it died before the request
            os._exit(1)

    def _pass_on(self, number: int, rank: int | None) -> None:
        for pid, local in self._living.items():
            if rank in (None, local):
                if number == signal.SIGKILL:
                    _kill_group(pid)
                else:
                    # Only the rank itself: loader workers must outlive the request to save and leave. One that has
                    # become another user, as sudo does, cannot be told; that is no reason to end the others.
                    with contextlib.suppress(PermissionError):
                        os.kill(pid, number)

    def _reap(self) -> None:
        """Report ranks that ended, and take in orphans."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            rank = self._living.pop(found.si_pid, None)
            if rank is not None:
                _kill_group(found.si_pid)  # while its number cannot be given to anyone else
            os.waitpid(found.si_pid, 0)
            if rank is not None:
                died = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._say(rank=rank, **({"killed": found.si_status} if died else {"code": found.si_status}))

    def _say(self, **word: object) -> None:
        self._control.sendall(json.dumps(word).encode() + b"\n")

    def _clear(self) -> None:
        """Kill all that is left. Whoever forks meanwhile is found in the next round."""
        self._control.close()
        until = time.monotonic() + CLEAR_S
        while time.monotonic() < until:
            for pid in self._living:
                _kill_group(pid)
            left = _descendants(self._pid)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            self._living.clear()
            if not left:
                return
            time.sleep(0.005)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command comes second, in brackets, and may itself contain spaces and brackets.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {root})


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What the launcher is told, it passes on itself. Handlers, unlike ignoring, end at exec.
        signal.signal(_number, lambda *_: None)
    Keeper(socket.socket(fileno=int(sys.argv[1]))).serve()
