"""Work on device streams: torch.distributed's works as `Work`, and memory that a stream still reads."""

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


def used_here(tensor: torch.Tensor) -> None:
    """Keep device memory from being reused while the current stream reads it: it was allocated on the stream of a
    gradient, which may be another one."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
