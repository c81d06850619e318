"""Work on device streams: torch.distributed's works as `Work`, and memory that a stream still reads."""

from functools import cached_property
from typing import Any

import torch


class StreamWork:
    """A collective on a device's stream, as NCCL's: waiting orders the current stream after it, not the host."""

    def __init__(self, raw: Any, tensor: torch.Tensor, divide_by: int) -> None:
        self._raw = raw
        self._tensor = tensor
        self._divide_by = divide_by
        self._ordered = False

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(self._raw.is_completed())

    def wait(self, seconds: float) -> bool:
        if not self._ordered:
            self._raw.wait()  # with a timeout NCCL would block the host
            if self._divide_by > 1:
                with torch.no_grad():
                    self._tensor.div_(self._divide_by)
            self._ordered = True
        return True

    def order(self) -> None:
        """Have the current stream go on after the collective, and nothing else. The memory that it reads and writes
        must be held until `wait`: torch lets go of it here."""
        self._raw.wait()


class StreamRecorder:
    """Queues events on the streams of one CUDA device: see `device_clock.py`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def captures(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def here(self) -> torch.cuda.Event | None:
        if self.captures():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, work: object) -> torch.cuda.Event | None:
        order = getattr(work, "order", None)
        if order is None or self.captures():
            return None
        with torch.cuda.stream(self._beside):
            order()
            return self.here()


def used_here(tensor: torch.Tensor) -> None:
    """Keep device memory from being reused while the current stream reads it: it was allocated on the stream of a
    gradient, which may be another one."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
