"""The stop button: SIGINT to the user's kernel while a cell runs on the ranks."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Wakened(BaseException):
    """Ends a wait, and is never seen outside of it."""


class Stop:
    """Counts requests to stop instead of raising KeyboardInterrupt in the middle of anything.

    A message that was half handled, or a line that was half shown, could not be put right afterwards. Only a wait is
    ended by the signal, so that it is felt at once. In a thread other than the main one, where Python handles no
    signals, nothing is counted.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._waiting = False
        self._before: Any = None
        self._is_set = False

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._is_set = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            self._is_set = False
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._waiting:
            self._waiting = False
            raise _Wakened

    def wakes(self, wait: Callable[[], T], otherwise: T) -> T:
        """Run `wait`, and return `otherwise` when a request to stop has come before its end."""
        try:
            self._waiting = True
            found = wait()
            self._waiting = False
        except _Wakened:
            return otherwise
        return found

    @contextmanager
    def raises(self) -> Iterator[None]:
        """A stretch in which SIGINT does what it did before: for the user's own input()."""
        if not self._is_set:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            yield
        except KeyboardInterrupt:
            self.asked += 1
        finally:
            signal.signal(signal.SIGINT, self._note)
