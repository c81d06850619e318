"""Several collectives in a row, each started from the result of the one before, as one work."""

import time
from collections.abc import Generator

import torch

from paceline.collectives.api import Work

Steps = Generator[Work, None, None]


class SteppedWork:
    """The work of a generator that starts a collective, yields its work, and goes on when that is complete.

    The first collective is started at once. The next ones are started by `done` and `wait`, on whichever thread calls
    them: nothing runs by itself. On a device a step is ordered after the collective on the current stream, as after any
    other work, and the host goes on; `done` takes that step only when the collective is over, so that computing never
    waits for it.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._current: Work | None = None
        self._failure: BaseException | None = None
        self._advance()

    def done(self) -> bool:
        try:
            while self._failure is None and self._current is not None:
                if not (self._current.done() and self._current.wait(0.0)):
                    return False
                self._advance()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._failure = error
        return True

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        if self._failure is not None:
            raise self._failure
        while self._current is not None:
            if not self._current.wait(max(0.0, deadline - time.monotonic())):
                return False
            self._advance()
        return True

    def _advance(self) -> None:
        try:
            with torch.no_grad():
                self._current = next(self._steps, None)
        except BaseException as error:
            self._failure = error  # a generator that has raised is over, and would pass for complete
            raise
