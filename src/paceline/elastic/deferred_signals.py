"""Signals whose handlers raise are deferred while an update runs, so that none interrupts it half-way."""

import signal
import threading
from types import FrameType
from typing import Any

# Signals that users, schedulers and timers send. Those without a Python handler keep their default action.
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

    A second one is not deferred: pressing Ctrl-C again must be able to stop an update that does not end.
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
        except BaseException:  # raised by the handler of a signal that came before it was deferred
            self.end()
            raise

    def end(self) -> None:
        """Restore the handlers, and call those whose signals have arrived, which may raise."""
        try:
            self._restore()
        finally:
            self._restore()
            noted, self._noted = self._noted, []
            _raise_all(noted)

    def _restore(self) -> None:
        for number, handler in list(self._earlier.items()):
            signal.signal(number, handler)  # once restored, it may raise right here, for another signal
            del self._earlier[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._noted:
            self._noted.remove(number)
            self._earlier[number](number, frame)
        else:
            self._noted.append(number)


def _raise_all(numbers: list[int]) -> None:
    """Raise each of them, even if the handler of an earlier one has raised."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_all(numbers[1:])
