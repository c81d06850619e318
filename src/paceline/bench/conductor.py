"""Starts every contender and lets one at a time run, in turns, so that noise hits all alike."""

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.bench.crew import Crew, CrewFailed, Order
from paceline.bench.wire import HungUp, Line

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a contender has no result."""

    message: str
    log: str = ""


class Conductor:
    """All crews of a run. Use it as a context: its end is the end of all workers.

    Example:
        >>> with Conductor(orders, timeout_s=60, say=print) as conductor:
        ...     answers = conductor.ask("torch", {"do": "run", ...})
    """

    def __init__(self, orders: Sequence[Order], *, timeout_s: float, say: Say) -> None:
        self._orders, self._timeout_s, self._say = orders, timeout_s, say
        self._crews: dict[str, Crew] = {}
        self.failures: dict[str, Failure] = {}
        self.built: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> "Conductor":
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(politely=kind is None)

    @property
    def labels(self) -> list[str]:
        """The contenders that are still in the run."""
        return [order.label for order in self._orders if order.label in self._crews]

    def ask(self, label: str, message: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The answers of all ranks of a contender. None when it failed, now or before."""
        with self._dropping(label):
            if label in self._crews:
                self._crews[label].tell(message)
                return self._crews[label].hear(self._timeout_s)
        return None

    def ask_all(self, messages: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Have contenders do what is not timed at the same time. The answers of those that did not fail."""
        for label, message in messages.items():
            with self._dropping(label):
                if label in self._crews:
                    self._crews[label].tell(message)
        answers = {}
        for label in messages:
            with self._dropping(label):
                if label in self._crews:
                    answers[label] = self._crews[label].hear(self._timeout_s)
        return answers

    def in_turns(self, rounds: int) -> Iterator[tuple[int, str]]:
        """(round, contender) with an order that rotates from round to round."""
        for number in range(rounds):
            labels = self.labels
            start = number % len(labels) if labels else 0
            for label in labels[start:] + labels[:start]:
                yield number, label

    # ---- start and end

    def _start(self) -> None:
        folder = Path(self._folder.name)
        address = str(folder / "conductor")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(256)
            for number, order in enumerate(self._orders):
                self._say(f"starting {order.label}: {order.size} {'ranks' if order.size > 1 else 'process'}")
                with self._dropping(order.label):
                    self._crews[order.label] = Crew(order, folder, number, address)
            self._welcome(listener)
        self._load()
        self._build()

    def _welcome(self, listener: socket.socket) -> None:
        """Accept connections until every rank of every crew is there, or its crew has been given up."""
        deadline = time.monotonic() + self._timeout_s
        listener.settimeout(0.2)
        while absent := [crew for crew in self._crews.values() if not crew.connected]:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                for crew in absent:
                    with self._dropping(crew.order.label):
                        crew.check_alive()
                        if time.monotonic() > deadline:
                            raise CrewFailed(f"did not start within {self._timeout_s:g} s", crew.tail()) from None
                continue
            connection.setblocking(True)
            self._admit(Line(connection))

    def _admit(self, line: Line) -> None:
        try:
            hello = line.receive(10.0)
        except (HungUp, TimeoutError):
            line.close()
            return
        crew = next((crew for crew in self._crews.values() if crew.key == hello["hello"]), None)
        if crew is None:  # given up meanwhile
            line.close()
        else:
            crew.lines[hello["rank"]] = line

    def _load(self) -> None:
        """Let all workers import what they need: this is most of the start."""
        facts = ("kind", "label", "size", "spec", "sources")
        starts = {order.label: {name: getattr(order, name) for name in facts} for order in self._orders}
        self.ask_all({label: {"do": "start", **start} for label, start in starts.items()})

    def _build(self) -> None:
        met = self.ask_all({label: {"do": "meet"} for label in self.labels})
        ports = {label: [answer["port"] for answer in answers] for label, answers in met.items()}
        self.built = self.ask_all({label: {"do": "build", "ports": found} for label, found in ports.items()})

    @contextmanager
    def _dropping(self, label: str) -> Iterator[None]:
        """A contender that fails in here leaves the run; the others go on."""
        try:
            yield
        except CrewFailed as failure:
            self._say(f"{label} failed: {failure}")
            self.failures[label] = Failure(str(failure), failure.log)
            crew = self._crews.pop(label, None)
            if crew is not None:
                crew.end()

    def _end(self, *, politely: bool = False) -> None:
        while self._crews:
            _, crew = self._crews.popitem()
            crew.end(politely=politely)
        self._folder.cleanup()
