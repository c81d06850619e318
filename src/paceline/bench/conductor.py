"""Starts all contenders and runs them one at a time, in turns, so that noise affects all alike."""

import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.bench.messages import receive
from paceline.bench.processes import ContenderFailed, ContenderProcesses, Order

Log = Callable[[str], None]


def no_log(_: str) -> None:
    """For callers that show no progress."""


class Conductor:
    """All contenders of a run. Use it as a context manager: leaving it ends all workers.

    Example:
        >>> with Conductor(orders, timeout_s=60, log=print) as conductor:
        ...     answers = conductor.ask("torch", "run", {...})
    """

    def __init__(self, orders: Sequence[Order], *, timeout_s: float, log: Log) -> None:
        self._orders, self._timeout_s, self._log = orders, timeout_s, log
        self._running: dict[str, ContenderProcesses] = {}
        self.failures: dict[str, ContenderFailed] = {}  # by label: why a contender has no result
        self.built: dict[str, list[dict[str, Any]]] = {}  # by label: what its ranks reported when they were built

    def __enter__(self) -> "Conductor":
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        try:
            self._start(Path(self._folder.name))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(graceful=kind is None)

    @property
    def labels(self) -> list[str]:
        """The contenders that are still in the run."""
        return [order.label for order in self._orders if order.label in self._running]

    @property
    def gpu(self) -> str | None:
        """The name of the GPU, if there is one."""
        return next((ranks[0]["gpu"] for ranks in self.built.values() if ranks[0].get("gpu")), None)

    def ask(self, label: str, do: str, *arguments: Any) -> list[Any] | None:
        """Call the method `do` of a contender's task on all of its ranks.

        Returns their answers, or None if the contender has failed, now or earlier.
        """
        return self.ask_all(do, {label: arguments}).get(label)

    def ask_all(self, do: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
        """Let contenders work at the same time, for work that is not timed.

        Returns the answers of those that did not fail.
        """
        for label, given in arguments.items():
            with self._dropping(label):
                if label in self._running:
                    self._running[label].send((do, *given))
        answers = {}
        for label in arguments:
            with self._dropping(label):
                if label in self._running:
                    answers[label] = self._running[label].receive(self._timeout_s)
        return answers

    def time(self, label: str, message: dict[str, Any]) -> list[float] | None:
        """The seconds of the slowest rank in each of the repetitions that `message` asks for."""
        answers = self.ask(label, "run", message)
        if answers is None:
            return None
        return [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]

    def in_turns(self, rounds: int, *, log_rounds: bool = False) -> Iterator[tuple[int, str]]:
        """(round, contender) in an order that rotates from round to round."""
        for number in range(rounds):
            if log_rounds:
                self._log(f"round {number + 1} of {rounds}")
            labels = self.labels
            start = number % len(labels) if labels else 0
            for label in labels[start:] + labels[:start]:
                yield number, label

    # ---- start and end

    def _start(self, folder: Path) -> None:
        address = str(folder / "conductor")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(256)
            for number, order in enumerate(self._orders):
                self._log(f"starting {order.label}: {order.size} {'ranks' if order.size > 1 else 'process'}")
                with self._dropping(order.label):
                    self._running[order.label] = ContenderProcesses(order, folder, number, address)
            self._accept_all(listener)
        # All at once: most of a start is imports.
        ports = self.ask_all("load", {order.label: (order,) for order in self._orders})
        self.built = self.ask_all("build", {label: (of_ranks,) for label, of_ranks in ports.items()})

    def _accept_all(self, listener: socket.socket) -> None:
        """Accept connections until all ranks of all contenders are there, or their contender was dropped."""
        deadline = time.monotonic() + self._timeout_s
        while absent := [found for found in self._running.values() if not found.connected]:
            if select.select([listener], [], [], 0.2)[0]:
                self._admit(Connection(listener.accept()[0].detach()))
                continue
            for found in absent:
                with self._dropping(found.order.label):
                    found.check_alive()
                    if time.monotonic() > deadline:
                        raise found.failure(f"did not start within {self._timeout_s:g} s")

    def _admit(self, connection: Connection) -> None:
        try:
            label, rank = receive(connection)
            self._running[label].connections[int(rank)] = connection
        except (EOFError, OSError, LookupError, ValueError, TypeError):  # it died, it is not ours, or its contender
            # was dropped meanwhile
            connection.close()

    @contextmanager
    def _dropping(self, label: str) -> Iterator[None]:
        """A contender that fails in here leaves the run; the others go on."""
        try:
            yield
        except ContenderFailed as failure:
            self._log(f"{label} failed: {failure}")
            self.failures[label] = failure
            dropped = self._running.pop(label, None)
            if dropped is not None:
                dropped.end()

    def _end(self, *, graceful: bool = False) -> None:
        while self._running:
            _, ended = self._running.popitem()
            ended.end(graceful=graceful)
        self._folder.cleanup()
