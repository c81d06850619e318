"""Signals whose handlers raise are kept back while an update runs, so that none of them ends it half-way."""

import signal
import threading
from types import FrameType
from typing import Any

# Those that people, schedulers and timers send. What has no handler of Python's own does what it always does.
DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class DeferredSignals:
    """From `begin()` to `end()` a first signal of each kind is noted, and its handler is called by `end()`.

    A second one is not kept back: whoever presses Ctrl-C again wants to leave an update that does not end.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, Any] = {}
        self._noted: list[int] = []

    def begin(self) -> None:
        """Python calls handlers in the main thread only; an update in another thread is never interrupted by them."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in DEFERRED:
                if callable(handler := signal.getsignal(number)):
                    self._earlier[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of the handler of one that came before it was kept back
            self.end()
            raise

    def end(self) -> None:
        """Put the handlers back, and call those whose signals have come, which may raise."""
        try:
            self._restore()
        finally:
            self._restore()
            noted, self._noted = self._noted, []
            _raise_all(noted)

    def _restore(self) -> None:
        for number, handler in list(self._earlier.items()):
            signal.signal(number, handler)  # once it is back it may raise right here, for another signal
            del self._earlier[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._noted:
            self._noted.remove(number)
            self._earlier[number](number, frame)
        else:
            self._noted.append(number)


def _raise_all(numbers: list[int]) -> None:
    """Each of them, also where the handler of one before it has raised."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_all(numbers[1:])
