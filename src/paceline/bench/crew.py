"""The rank processes of one contender, as the conductor holds them."""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.wire import HungUp, Line

TAIL_LINES = 5
LINE_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Order:
    """What a crew is to do."""

    label: str
    kind: str
    spec: dict[str, Any]
    size: int
    threads: int
    device: str
    launcher: str = "plain"
    sources: str = ""  # of another checkout, to import paceline from


class CrewFailed(Exception):
    """A contender cannot go on. The message is one line; `log` is the end of what its ranks wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(_short(message.splitlines()[0]))
        self.log = "\n".join(map(_short, log.splitlines()))


class Crew:
    """Processes of one contender. Ended by their own ids only."""

    def __init__(self, order: Order, folder: Path, number: int, address: str) -> None:
        self.order = order
        self.lines: dict[int, Line] = {}
        self._logs = [folder / f"{number}-{rank}.log" for rank in range(order.size)]
        self.key = f"{number}:{order.label}"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(address)
        except BaseException:
            self.end()
            raise

    def _start(self, address: str) -> None:
        worker = [sys.executable, "-m", "paceline.bench.worker", address, self.key]
        if self.order.launcher == "mpiexec":
            mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
            if mpiexec is None:
                raise CrewFailed("mpiexec was not found; pip install mpich")
            self._spawn([mpiexec, "-n", str(self.order.size), *worker, "mpi"], self._logs[0], self._environment(None))
            return
        for rank, log in enumerate(self._logs):
            self._spawn([*worker, str(rank)], log, self._environment(rank))

    def _spawn(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("wb") as file:
            # Not in the terminal's group: Ctrl-C is for the conductor, which then ends its workers.
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            )

    def _environment(self, rank: int | None) -> dict[str, str]:
        size, threads = self.order.size, str(self.order.threads)
        found = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        found |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TF_CPP_MIN_LOG_LEVEL": "2"}
        found["PATH"] = f"{Path(sys.executable).parent}:{found.get('PATH', '')}"
        if self.order.device == "cpu":
            found |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        if rank is not None:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            found |= {name: str(value) for name, value in place.items()}
        return found

    @property
    def connected(self) -> bool:
        return len(self.lines) == self.order.size

    def check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise CrewFailed(_ended(process.returncode), self.tail())

    def tell(self, message: dict[str, Any]) -> None:
        """Send `message` to every rank."""
        try:
            for line in self.lines.values():
                line.send(message)
        except HungUp as error:
            raise CrewFailed(str(error), self.tail()) from error

    def hear(self, timeout_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks to what they were told, in rank order. Serves their line-ups meanwhile."""
        exchange = _Exchange(self.lines, self.tail)
        try:
            return exchange.run(timeout_s)
        except HungUp as error:
            for process in self._processes:
                _wait(process, 1.0)
            codes = [p.returncode for p in self._processes if p.returncode is not None]
            raise CrewFailed(_ended(codes[0]) if codes else str(error), self.tail()) from error
        finally:
            exchange.close()

    def tail(self) -> str:
        """The last lines that any rank wrote."""
        texts = [log.read_text(errors="replace").strip() for log in self._logs if log.exists()]
        longest = max(texts, key=len, default="")
        return "\n".join(longest.splitlines()[-TAIL_LINES:])

    def end(self, *, politely: bool = False) -> None:
        """End every process: by word, by hang-up, by signal."""
        if politely and self.connected:
            try:
                self.tell({"do": "end"})
                self.hear(5.0)
            except CrewFailed:
                politely = False
        for line in self.lines.values():
            line.close()
        self.lines.clear()
        for process in self._processes:
            if not _wait(process, 3.0 if politely else 0.5):
                process.send_signal(signal.SIGTERM)
            if not _wait(process, 2.0):
                process.kill()
                process.wait()


class _Exchange:
    """The answers of all ranks of a crew to one message."""

    def __init__(self, lines: dict[int, Line], tail: Callable[[], str]) -> None:
        self._lines, self._tail = lines, tail
        self._selector = selectors.DefaultSelector()
        self._answers: dict[int, dict[str, Any]] = {}
        self._waiting: set[int] = set()  # ranks at the line
        for rank, line in lines.items():
            self._selector.register(line.fileno(), selectors.EVENT_READ, rank)

    def run(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while len(self._answers) < len(self._lines):
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(self._lines.keys() - self._answers.keys() - self._waiting)
                raise CrewFailed(f"no answer from rank {silent} within {timeout_s:g} s", self._tail())
            for key, _ in ready:
                self._read(key.data)
                while self._lines[key.data].has_more():
                    self._read(key.data)
        return [self._answers[rank] for rank in sorted(self._answers)]

    def _read(self, rank: int) -> None:
        message = self._lines[rank].receive(10.0)
        if "failed" in message:
            raise CrewFailed(f"rank {rank}: {message['failed']}", self._tail())
        if "answer" in message:
            self._answers[rank] = message["answer"]
            return
        self._waiting.add(rank)
        if len(self._waiting) == len(self._lines):
            self._waiting.clear()
            for line in self._lines.values():
                line.send({"go": True})

    def close(self) -> None:
        self._selector.close()


def _short(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 1] + "…"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _ended(code: int) -> str:
    if code < 0:
        return f"a rank was ended by {signal.Signals(-code).name}"
    return f"a rank has ended with exit code {code}"
