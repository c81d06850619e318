"""Signals to the launcher, kept until the supervising loop asks for them."""

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class PendingSignals:
    """Collects signals while it is entered. Python gives them to the main thread only; elsewhere it collects none."""

    def __init__(self) -> None:
        self._pending: deque[int] = deque()
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> "PendingSignals":
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                # A signal that the launcher inherits as ignored, as under nohup, stays ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, _: self._pending.append(number))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def next(self) -> int | None:
        """The oldest signal that is not handled yet."""
        return self._pending.popleft() if self._pending else None
