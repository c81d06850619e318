"""The streams of a device that the gradients in one bucket were made on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

# The current stream of a device as a number. Called for every gradient on a device.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: -1)


class GradStreams:
    """Autograd runs a backward on the stream of its forward, so gradients of one bucket may come from several."""

    def __init__(self, device: torch.device) -> None:
        self.device_index = device.index or 0
        self.newest = -1  # the number of the stream that the last gradient was made on
        self._device = device
        self._streams: list[torch.cuda.Stream] = []  # all of them, the newest one last

    def note_current(self) -> None:
        """The next gradients are computed on the current stream, unlike those before."""
        self.newest = raw_stream(self.device_index)
        stream = torch.cuda.current_stream(self._device)
        self._streams = [*(other for other in self._streams if other != stream), stream]

    def on_newest(self) -> AbstractContextManager[object]:
        """Run the block on the stream of the last gradient."""
        return torch.cuda.stream(self._streams[-1]) if self._made_elsewhere() else nullcontext()

    def join(self) -> None:
        """Make the current stream wait for all of them."""
        if len(self._streams) > 1 or self._made_elsewhere():
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            self.newest, self._streams = raw_stream(self.device_index), [current]

    def forget(self) -> None:
        self.newest = -1
        self._streams.clear()

    def _made_elsewhere(self) -> bool:
        """Whether the last gradient was made on another stream than the current one."""
        return self.newest != -1 and raw_stream(self.device_index) != self.newest
