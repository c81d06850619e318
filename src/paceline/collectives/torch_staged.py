"""Host tensors over a backend that only moves device memory, as that of a group formed with "nccl" alone does."""

import torch

from paceline.collectives.protocols import Op, Transport, Work
from paceline.collectives.wait import EventWork


class DeviceStaging:
    """Each collective goes through a copy on the current device."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        staged = flat.to(_current_device())
        return StagedWork(self._transport.all_reduce(staged, op), staged, flat)

    def broadcast(self, flat: torch.Tensor, root: int) -> Work:
        staged = flat.to(_current_device())
        return StagedWork(self._transport.broadcast(staged, root), staged, flat)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        staged = out.to(_current_device())
        return StagedWork(self._transport.all_gather(staged, part.to(_current_device())), staged, out)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        staged = out.to(_current_device())
        return StagedWork(self._transport.all_to_all(staged, flat.to(_current_device())), staged, out)


class StagedWork:
    """A collective on a device copy of a host tensor: complete when the result is back in the host tensor."""

    def __init__(self, work: Work, staged: torch.Tensor, home: torch.Tensor) -> None:
        self._work = work
        self._staged = staged
        self._home = home
        self._to_host: tuple[torch.Tensor, EventWork] | None = None
        self._complete = False

    def done(self) -> bool:
        return self._complete or self._work.done()

    def wait(self, seconds: float) -> bool:
        """A plain copy to the host would wait for the device, and so for all ranks, without being interruptible."""
        if self._complete:
            return True
        if self._to_host is None:
            if not self._work.wait(seconds):
                return False
            host = torch.empty(self._staged.shape, dtype=self._staged.dtype, device="cpu", pin_memory=True)
            host.copy_(self._staged, non_blocking=True)
            self._to_host = host, EventWork(torch.cuda.current_stream(self._staged.device).record_event())
        host, copied = self._to_host
        if copied.wait(seconds):
            self._home.copy_(host.view_as(self._home))
            self._to_host = None
            self._complete = True
        return self._complete


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
