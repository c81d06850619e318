"""The rank processes of one contender, as the conductor holds them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.bench.contenders import ContenderName

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
    """The processes of one contender. Only these process ids are ever signalled."""

    def __init__(self, order: Order, folder: Path, number: int, address: str) -> None:
        self.order = order
        self.connections: dict[int, Connection] = {}  # by rank
        self._logs = [folder / f"{number}-{rank}.log" for rank in range(order.size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(address)
        except BaseException:
            self.end()
            raise

    def _start(self, address: str) -> None:
        worker = [sys.executable, "-m", "paceline.bench.worker", address, self.order.label]
        if self.order.mpiexec:
            mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
            if mpiexec is None:
                raise ContenderFailed("mpiexec was not found; pip install mpich")
            self._spawn([mpiexec, "-n", str(self.order.size), *worker, "mpi"], self._logs[0], {})
            return
        size = self.order.size
        for rank, log in enumerate(self._logs):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            self._spawn([*worker, str(rank)], log, {name: str(value) for name, value in world.items()})

    def _spawn(self, command: list[str], log: Path, world: dict[str, str]) -> None:
        threads = str(self.order.threads)
        environment = os.environ | world
        environment |= {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        if self.order.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        with log.open("wb") as file:
            # In a session of its own: Ctrl-C interrupts the conductor alone, which then ends its workers.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._processes.append(process)

    @property
    def connected(self) -> bool:
        return len(self.connections) == self.order.size

    def check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise self.failure(_describe_exit(process.returncode))

    def send(self, message: Any) -> None:
        """Send `message` to every rank."""
        try:
            for connection in self.connections.values():
                connection.send(message)
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
            kind, content = connection.recv()
        except (EOFError, OSError) as error:
            for process in self._processes:
                _wait(process, 1.0)
            codes = [process.returncode for process in self._processes if process.returncode is not None]
            raise self.failure(_describe_exit(codes[0]) if codes else "a rank closed its connection") from error
        return kind, content

    def failure(self, message: str) -> ContenderFailed:
        """`message` with the last lines that any rank wrote."""
        texts = [log.read_text(errors="replace").strip() for log in self._logs if log.exists()]
        longest = max(texts, key=len, default="")
        return ContenderFailed(message, "\n".join(longest.splitlines()[-TAIL_LINES:]))

    def end(self, *, graceful: bool = False) -> None:
        """End every process: by a request if `graceful`, then by closing its connection, then by signals."""
        if graceful and self.connected:
            try:
                self.send(("close",))
                self.receive(5.0)
            except ContenderFailed:
                graceful = False
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        for process in self._processes:
            if not _wait(process, 3.0 if graceful else 0.5):
                process.send_signal(signal.SIGTERM)
            if not _wait(process, 2.0):
                process.kill()
                process.wait()


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 1] + "…"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"a rank was killed by {signal.Signals(-code).name}"
    return f"a rank exited with status {code}"
