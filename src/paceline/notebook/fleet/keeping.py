"""The processes of the ranks, through the keeper.

**Why nothing is left behind.** Ranks are not children of the user's kernel but of a keeper (`launch/keeper.py`), a
small process of the standard library alone that waits at one end of a socket. The other end is here, closed on exec, so
no child of the kernel holds it either. However this process ends, by an orderly exit, a restart of the kernel or
SIGKILL, the system closes its end; the keeper wakes, kills all that descends from it (it is the subreaper, so also what
left its session), and goes. Where a forked child of this process holds that end open, the keeper sees within a second
that it has another parent. When the keeper itself is killed, the system kills the ranks, who asked for that when they
started, and what they had started is found by their session (`launch/orphans.py`).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch import keeper
from paceline.launch.orphans import end_sessions
from paceline.launch.seat import SECRET_NAME
from paceline.launch.vitals import kills_for_memory
from paceline.notebook.fleet.raw_output import RawOutput

KEEPER_S = 10.0
KEEPER_KILLED = "was ended by the system, since the process that keeps the ranks was killed"


@dataclass(frozen=True)
class Started:
    """A rank's process lives."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Gone:
    """A rank's process has ended. `how` goes on after "rank 1 "."""

    rank: int
    how: str


class Keeping:
    """This process's end of the keeper, and what the ranks write outside of Python."""

    def __init__(self, size: int) -> None:
        self.out = [RawOutput(f"paceline-rank-{rank}-out") for rank in range(size)]
        self.err = [RawOutput(f"paceline-rank-{rank}-err") for rank in range(size)]
        self._living: dict[int, int] = {}  # rank → process id, 0 while it is not told
        self._rest = b""
        self._killed_for_memory = kills_for_memory()
        self._open()

    def _open(self) -> None:
        self._control, theirs = socket.socketpair()
        self.lost = False
        handed = [stream.descriptor for stream in (*self.out, *self.err)]
        with theirs:
            # Isolated, and without site packages: what breaks the environment of the ranks does not break the keeper's.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *handed],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != SECRET_NAME},
            )

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._control.fileno()

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank's process in the folder of this one."""
        if self.lost:
            self._dismiss()
            self._open()
        self.begin_anew(rank)
        out, err = self.out[rank].descriptor, self.err[rank].descriptor
        self._living[rank] = 0
        self._say(
            rank=rank,
            command=list(command),
            environment=dict(environment),
            folder=str(Path.cwd()),
            stdin=False,
            out=out,
            err=err,
            keep=[],
            shared=[out, err],  # kept for the next process of this rank
        )

    def begin_anew(self, rank: int) -> None:
        """What the rank said before are not its last words."""
        self.out[rank].begin_anew()
        self.err[rank].begin_anew()

    def kill(self, rank: int) -> None:
        """SIGKILL to the rank and all processes of its group."""
        self._say(signal=int(signal.SIGKILL), rank=rank)

    def news(self) -> list[Started | Gone]:
        """What the keeper has said since the last call."""
        found: list[Started | Gone] = []
        try:
            while not self.lost:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
                self.lost = not data
                *lines, self._rest = (self._rest + data).split(b"\n")
                found += [self._hear(json.loads(line)) for line in lines]
        except BlockingIOError:
            return found
        except OSError:
            self.lost = True
        return found + self._outlive_keeper()

    def last_words(self, rank: int) -> tuple[str, ...]:
        """The end of its standard error, or of its standard output when there it said nothing."""
        words, other = self.err[rank].last_words(), self.out[rank].last_words()
        return words or other

    def _hear(self, word: dict[str, int]) -> Started | Gone:
        rank = word["rank"]
        if "pid" in word:
            self._living[rank] = word["pid"]
            return Started(rank, word["pid"])
        self._living.pop(rank, None)
        if "never" in word:
            return Gone(rank, f"could not be started: {word['never']}")
        if "killed" in word:
            return Gone(rank, f"was killed by {self._signal_name(word['killed'])}")
        return Gone(rank, f"exited with {word['code']}")

    def _signal_name(self, number: int) -> str:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number == signal.SIGKILL and kills_for_memory() > self._killed_for_memory:
            self._killed_for_memory = kills_for_memory()
            return f"{name}, because the machine ran out of memory"
        return name

    def _outlive_keeper(self) -> list[Started | Gone]:
        living, self._living = self._living, {}
        self._rest = b""
        if living:
            end_sessions([pid for pid in living.values() if pid])
        return [Gone(rank, KEEPER_KILLED) for rank in living]

    def _say(self, **word: object) -> None:
        # When there is nobody to hear it, `news` says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(json.dumps(word).encode() + b"\n")

    def _dismiss(self) -> None:
        """The keeper kills what is left of the ranks, and goes."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(KEEPER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()

    def close(self) -> None:
        """End all ranks at once, and all that they started."""
        self._dismiss()
        for stream in (*self.out, *self.err):
            stream.close()
