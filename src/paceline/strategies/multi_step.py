"""Several collectives in a row, each using the result of the previous one, as one work.

On a host, each step is taken when the work is waited for or queried. On a device all can be queued at once, on a stream
beside the one that computes.
"""

import time
from collections.abc import Generator, Sequence

import torch

from paceline.collectives.protocols import Work
from paceline.collectives.stream_work import used_here

Steps = Generator[Work, None, None]


class SteppedWork:
    """The work of a generator that starts a collective, yields its work, and continues when that is complete.

    The first collective is started at once. The next ones are started by `done` and `wait`, on whichever thread calls
    them: no thread runs in the background. On a device a step is ordered after the collective on the current stream, as
    after any other work, and the host goes on; `done` takes that step only when the collective is over, so that
    computing never waits for it.
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
            self._failure = error  # a generator that has raised has ended, and would look complete
            raise


class SideStream:
    """Where the collectives of a transport are queued on streams (`Traits.stream_ordered`), their steps can be too: the
    host goes on, and the stream that computes waits for none of them.

    Why two replicas need two
    -------------------------
    Work on a stream waits for everything queued before it. Two replicas in one backward may queue in one order on one
    rank and in another order on the next, and then each rank would wait for the other. So a copy gets its own stream.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, steps: Steps, device: torch.device, *, uses: Sequence[torch.Tensor]) -> "QueuedWork":
        """Queue all `steps`, after the work of the current stream. They touch the tensors in `uses`."""
        side = self._streams.get(device)
        if side is None:
            # Before the kernels of backward: other ranks wait for these sums.
            side = self._streams[device] = torch.cuda.Stream(device, priority=-1)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for tensor in uses:
                used_here(tensor)
            queued = SteppedWork(steps).wait(0.0)
            assert queued, "a collective that is queued on a stream made the host wait"
            return QueuedWork(side.record_event(), device)

    def __reduce__(self) -> tuple[type["SideStream"], tuple[()]]:
        return type(self), ()


class QueuedWork:
    """Work queued up to an event: waiting orders the current stream after it, without blocking the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def wait(self, seconds: float) -> bool:
        self.order()
        return True

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
