"""All steps of a reduction at once, on a stream beside the one that computes."""

from collections.abc import Sequence

import torch

from paceline.collectives.reduction import used_here
from paceline.strategies.steps import SteppedWork, Steps


class SideStream:
    """Where the collectives of a transport are queued (`Transport.queues`), their steps can be too: the host goes on,
    and the stream that computes waits for none of them.

    Why two replicas need two
    -------------------------
    What is queued waits for all that was queued before it. Two replicas in one backward may queue in one order on one
    rank and in another order on the next, and then each rank would wait for the other. So a copy begins anew.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, steps: Steps, device: torch.device, *, uses: Sequence[torch.Tensor]) -> "QueuedWork":
        """Queue all `steps`, after what the current stream has been given. They touch the tensors in `uses`."""
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
    """What was queued until an event: waiting orders the current stream after it, not the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def wait(self, seconds: float) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True
