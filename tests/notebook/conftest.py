"""Real ranks for a whole module, and a view that keeps what it is shown."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest
from jupyter_core.utils import ensure_event_loop

from paceline.notebook.events import Event, Failed, Noticed, Wrote
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
from paceline.notebook.rank_kernels.startup import StartupProgress
from tests.conftest import Belongings, _leaks
from tests.pool import Pool

T = TypeVar("T")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Record:
    """A view that keeps all events. When `stop_at` is written or noticed, SIGINT comes a moment later."""

    def __init__(self, stop_at: str = "") -> None:
        self.events: list[Event] = []
        self.times: list[float] = []
        self.closed = 0
        self.stopped_at = 0.0
        self._stop_at = stop_at

    def take(self, event: Event, now: float) -> None:
        self.events.append(event)
        self.times.append(now)
        if self._stop_at and isinstance(event, Wrote | Noticed) and self._stop_at in event.text:
            self._stop_at = ""
            threading.Timer(0.15, self._stop).start()

    def _stop(self) -> None:
        self.stopped_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    def tick(self, now: float) -> None:
        pass

    def close(self, now: float) -> None:
        self.closed += 1

    def of(self, kind: type[T], rank: int | None = None) -> list[T]:
        """The events of a kind, of one rank or of all."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if rank is None or getattr(event, "rank", None) == rank]

    def text(self, rank: int, stream: str = "stdout") -> str:
        return "".join(event.text for event in self.of(Wrote, rank) if event.stream == stream)

    def traceback(self, rank: int) -> str:
        return COLOURS.sub("", "\n".join("\n".join(event.traceback) for event in self.of(Failed, rank)))


def unseen(view: StartupProgress) -> None:
    """A boot that nobody looks at."""


@pytest.fixture(scope="module", autouse=True)
def leak_police() -> Iterator[None]:
    """As for all tests, but per module: ranks live as long, and a rank that is started anew has other sockets."""
    ensure_event_loop()  # made on first use by jupyter's blocking clients, and kept for the thread
    before, pool, lazy_pipe = Belongings.now(), Pool(), [""]
    yield
    deadline = time.monotonic() + 2.0
    while (leaks := _leaks(before, pool, lazy_pipe)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not leaks


@pytest.fixture(scope="module")
def kernels(leak_police: None) -> Iterator[RankKernels]:
    """Two started ranks."""
    started = RankKernels(StartOptions(2, gpu_ids=()), unseen)
    yield started
    started.close()
