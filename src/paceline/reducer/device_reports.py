"""Reports where collectives are ordered by streams: they are gathered on the device. The host sends them without
waiting, and reads them from its own memory later."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.wait import EventWork
from paceline.reducer.report import PendingReports, StepReport, column_of
from paceline.reducer.step_observer import Findings

# The columns of a report that are read or filled in on the device.
BROKEN = 0
MODE, WEIGHT, STATE, NOT_FINITE = map(column_of, ("mode", "weight", "state", "not_finite"))


class DeviceReports:
    """Sends reports on the current stream of a device. Buffers are reused when their reports have been read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[_Buffers] = []

    def send(self, report: StepReport, transport: Transport, found: Findings) -> PendingReports:
        """Findings that only the device knows are filled in there."""
        encoded = report.encode()
        buffers = self._take(len(encoded), transport.size)
        buffers.written[:] = encoded
        buffers.part.copy_(buffers.sent, non_blocking=True)
        for column, number in ((STATE, found.state), (NOT_FINITE, found.not_finite)):
            if isinstance(number, torch.Tensor):
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
