"""How reports travel between ranks, and when they can be read.

On a host they are gathered by the transport, and whoever waits for the gradients waits for them too. Where collectives
are ordered by streams, they are gathered on the device: the host sends them without waiting, and finds them in its own
memory some time after.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.api import Transport, Work
from paceline.collectives.event_work import EventWork
from paceline.errors import GraphChanged
from paceline.reducer.report import BROKEN, NOT_FINITE, STATE, StepReport

# What of a report may be known on the device alone: its column, and the number.
OnDevice = Sequence[tuple[int, torch.Tensor]]


@dataclass(eq=False, slots=True)
class PendingReports:
    """The reports of one reduction, on their way. They may be read once `work` is complete."""

    number: int
    work: Work
    peek: Callable[[], list[StepReport]]
    release: Callable[[], None] = lambda: None
    on_device: torch.Tensor | None = None  # one row per rank, ordered after the collective on the current stream
    broken: torch.Tensor | None = None  # there, for each rank: 1.0 if its gradients must not be used
    graph_error: GraphChanged | None = None  # of this rank
    gated: bool = False  # an optimizer was told, on the device, whether to take its step
    computed: Work | None = None  # on a device: done when this rank has computed all that it sent

    @property
    def what(self) -> str:
        return f"the reports of reduction {self.number}"

    def rows(self) -> list[StepReport]:
        """One report per rank. The memory that they came in is used again."""
        found = self.peek()
        self.release()
        return found


def send_from_host(report: StepReport, transport: Transport) -> PendingReports:
    encoded = torch.tensor(report.encode(), dtype=torch.int64, device="cpu")
    gathered = torch.empty(transport.size, len(encoded), dtype=torch.int64, device="cpu")
    work = transport.all_gather(gathered, encoded)
    lanes = len(report.lane_weights)

    def rows() -> list[StepReport]:
        return [StepReport.decode(row, lanes) for row in gathered.tolist()]

    return PendingReports(report.reduction, work, rows)


class DeviceReports:
    """Sends reports on the current stream of a device. Buffers are used again when their reports have been read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[_Buffers] = []

    def send(self, report: StepReport, transport: Transport, on_device: OnDevice) -> PendingReports:
        """`on_device`: numbers of the report that only the device knows."""
        encoded = report.encode()
        buffers = self._take(len(encoded), transport.size)
        buffers.written[:] = encoded
        buffers.part.copy_(buffers.sent, non_blocking=True)
        for column, number in on_device:
            buffers.part[column].copy_(number)
        ordered = transport.all_gather(buffers.gathered.view(-1), buffers.part).wait(0.0)
        assert ordered, "a collective that is ordered by streams made the host wait"
        buffers.received.copy_(buffers.gathered, non_blocking=True)
        event = torch.cuda.current_stream(self._device).record_event()
        lanes = len(report.lane_weights)

        def rows() -> list[StepReport]:
            return [StepReport.decode(row, lanes) for row in buffers.received.tolist()]

        def release() -> None:
            self._free.append(buffers)

        return PendingReports(report.reduction, EventWork(event), rows, release, buffers.gathered, buffers.broken)

    def _take(self, width: int, size: int) -> "_Buffers":
        while self._free:
            found = self._free.pop()
            if found.gathered.shape == (size, width):
                return found
        return _Buffers.of(width, size, self._device)


@dataclass(eq=False, slots=True)
class _Buffers:
    sent: torch.Tensor
    written: Any  # the same memory, as Python writes it
    part: torch.Tensor
    gathered: torch.Tensor
    received: torch.Tensor
    broken: torch.Tensor  # the column of `gathered`

    @classmethod
    def of(cls, width: int, size: int, device: torch.device) -> "_Buffers":
        words = torch.int64
        gathered = torch.empty(size, width, dtype=words, device=device)
        sent = torch.empty(width, dtype=words, device="cpu", pin_memory=True)
        return cls(
            sent,
            (ctypes.c_int64 * width).from_address(sent.data_ptr()),
            torch.empty(width, dtype=words, device=device),
            gathered,
            torch.empty(size, width, dtype=words, device="cpu", pin_memory=True),
            gathered.view(torch.float32)[:, 2 * BROKEN],
        )


def known_on_device(state: object, not_finite: object) -> OnDevice:
    """The findings that are tensors, with their columns."""
    found = ((STATE, state), (NOT_FINITE, not_finite))
    return [(column, value) for column, value in found if isinstance(value, torch.Tensor)]
