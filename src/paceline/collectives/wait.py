"""Works that can only be polled: futures, and events of a device."""

import time
from collections.abc import Callable
from typing import Any

import torch


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Poll until it is done or `seconds` have passed, at growing intervals. Returns whether it is done."""
    deadline = time.monotonic() + seconds
    pause_s = 0.00002
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.0005)
    return True


class FutureWork:
    """A `torch.futures.Future` that can be waited on with a deadline. Futures have no timed wait, so it polls.

    `after` runs once, on the thread that waits, when the future is complete.
    """

    def __init__(self, future: "torch.futures.Future[Any]", after: Callable[[], object] | None = None) -> None:
        self._future = future
        self._after = after

    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float) -> bool:
        if not poll(self._future.done, seconds):
            return False
        self._future.wait()  # orders CUDA streams and raises the hook's own error
        if self._after is not None:
            self._after()
            self._after = None
        return True


class EventWork:
    """The work of a device up to an event. Unlike `Event.synchronize`, Ctrl-C ends the wait and an absent rank is
    named."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def wait(self, seconds: float) -> bool:
        return poll(self._event.query, seconds)
