"""Waiting for a device: in slices, so that Ctrl-C is heard and a rank that does not come is named."""

import torch

from paceline.collectives.wait import poll


class EventWork:
    """What a device does until an event. Unlike `Event.synchronize` the wait can be left."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def wait(self, seconds: float) -> bool:
        return poll(self._event.query, seconds)
