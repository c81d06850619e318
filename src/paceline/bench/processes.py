"""The rank processes of one contender, as the conductor sees them."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.bench.contenders import ContenderName
from paceline.bench.messages import receive, send
from paceline.launch.rank_processes import RankExited, RankProcesses

TAIL_LINES = 5
LINE_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks of one contender are to measure."""

    label: str
    task: str  # the Task that its ranks run, as module:NAME or FILE.py:NAME
    contender: str  # its name, with arguments
    spec: Any
    size: int
    threads: int
    device: str
    mpiexec: bool = False
    sources: str = field(init=False)  # of another checkout, to import paceline from; empty: of this one

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", ContenderName.parse(self.contender).sources)


class ContenderFailed(Exception):
    """A contender cannot go on. The message is one line; `log` is the end of what its ranks wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(_shortened(message.splitlines()[0]))
        self.log = "\n".join(map(_shortened, log.splitlines()))


class ContenderProcesses:
    """The processes of one contender. None of them outlives `end`, or the conductor."""

    def __init__(self, order: Order, folder: Path, number: int, address: str) -> None:
        self.order = order
        self.connections: dict[int, Connection] = {}  # by rank
        self._logs = [folder / f"{number}-{rank}.log" for rank in range(order.size)]
        self._exits: list[RankExited] = []  # the first one first
        worker = [sys.executable, "-m", "paceline.bench.worker", address, order.label]
        if order.mpiexec:
            mpiexec = shutil.which("mpiexec", path=_search_path())
            if mpiexec is None:
                raise ContenderFailed("mpiexec was not found; pip install mpich")
            commands = [[mpiexec, "-n", str(order.size), *worker, "mpi"]]
        else:
            commands = [[*worker, str(rank)] for rank in range(order.size)]
        self._processes = RankProcesses(streams=subprocess.DEVNULL)
        try:
            for rank, command in enumerate(commands):
                with self._logs[rank].open("wb") as log:
                    self._processes.start(rank, command, self._environment(rank), out=log.fileno(), err=log.fileno())
        except BaseException:
            self.end()
            raise

    def _environment(self, rank: int) -> dict[str, str]:
        threads, size = str(self.order.threads), str(self.order.size)
        found = {**os.environ, "PATH": _search_path(), "PYTHONUNBUFFERED": "1"}
        found |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        found |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TF_CPP_MIN_LOG_LEVEL": "2"}
        if not self.order.mpiexec:
            found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        if self.order.device == "cpu":
            found |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        return found

    @property
    def connected(self) -> bool:
        return len(self.connections) == self.order.size

    def check_alive(self) -> None:
        if exits := self._exited(within_s=0.0):
            raise self.failure(f"a rank {exits[0].how}")

    def _exited(self, within_s: float) -> list[RankExited]:
        """How processes have exited, as soon as all have or the time is over."""
        deadline = time.monotonic() + within_s
        while True:
            self._exits += [event for event in self._processes.events() if isinstance(event, RankExited)]
            left_s = deadline - time.monotonic()
            if not self._processes.living or left_s <= 0:
                return self._exits
            wait([self._processes.fileno()], left_s)

    def send(self, message: Any) -> None:
        """Send `message` to every rank."""
        try:
            for connection in self.connections.values():
                send(connection, message)
        except OSError as error:
            raise self.failure(f"could not send to a rank: {error}") from error

    def receive(self, timeout_s: float) -> list[Any]:
        """The answers of all ranks in rank order. Releases their barriers meanwhile."""
        answers: dict[int, Any] = {}
        at_barrier: set[int] = set()
        ranks = {connection: rank for rank, connection in self.connections.items()}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(ranks):
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(set(ranks.values()) - answers.keys() - at_barrier)
                raise self.failure(f"no answer from rank {silent} within {timeout_s:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                kind, content = self._read(connection)
                rank = ranks[connection]
                if kind == "failed":
                    raise self.failure(f"rank {rank}: {content}")
                if kind == "answer":
                    answers[rank] = content
                else:
                    at_barrier.add(rank)
            if len(at_barrier) == len(ranks):
                at_barrier.clear()
                self.send("go")
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, connection: Connection) -> tuple[str, Any]:
        try:
            kind, content = receive(connection)
        except (EOFError, OSError) as error:
            exits = self._exited(within_s=1.0)
            how = exits[0].how if exits else "closed its connection"
            raise self.failure(f"a rank {how}") from error
        except (ValueError, TypeError) as error:
            raise self.failure(f"a rank sent an invalid message: {error}") from error
        return kind, content

    def failure(self, message: str) -> ContenderFailed:
        """`message` with the last lines that any rank wrote."""
        texts = [log.read_text(errors="replace").strip() for log in self._logs if log.exists()]
        longest = max(texts, key=len, default="")
        return ContenderFailed(message, "\n".join(longest.splitlines()[-TAIL_LINES:]))

    def end(self, *, graceful: bool = False) -> None:
        """End every process, by a request first if `graceful`."""
        if graceful and self.connected:
            with contextlib.suppress(ContenderFailed):
                self.send(("close",))
                self.receive(5.0)
                self._exited(within_s=3.0)
        self._processes.close()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 1] + "…"


def _search_path() -> str:
    """With the programs of this environment, also where it is not active."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
