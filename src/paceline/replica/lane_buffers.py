"""Buffers in lanes, such as running statistics: what they become does not depend on the world.

The rule: every lane of a step begins with the same buffers. Afterwards a buffer that some lane has changed becomes the
mean of what the lanes have made of it, added up in the order of the tree over lane numbers; if it does not hold
floating point numbers, what lane 0 has made of it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from paceline.collectives.api import Op, Transport
from paceline.collectives.tree import tree_sum
from paceline.collectives.wait import finish
from paceline.reducer.lanes import Lanes

_PATTERNS = {4: torch.int32, 8: torch.int64}
COMPARED_BYTES = 1 << 20  # up to here a buffer is compared by value: kernels of torch change some behind its back


@dataclass(slots=True)
class _Seen:
    """A buffer as it was when the step began."""

    value: torch.Tensor
    version: int
    address: int


class LaneBuffers:
    """The buffers of one module, from lane to lane."""

    def __init__(self, module: nn.Module, ignored: set[str], lanes: Lanes) -> None:
        self._module = module
        self._ignored = ignored
        self._lanes = lanes
        self._known: set[str] = set()  # to change; agreed by all ranks, so that they need not be compared
        self._before: dict[str, _Seen] = {}
        self._after: dict[str, dict[int, torch.Tensor]] = {}  # by name and lane: what lanes have made of it

    def begin(self) -> None:
        """A step begins: remember what buffers are now."""
        named = self._named()
        self._after.clear()
        for name in self._before.keys() - named.keys():
            del self._before[name]
        for name, buffer in named.items():
            if name not in self._before or self._changed(name, buffer):
                self._before[name] = _Seen(buffer.detach().clone(), buffer._version, buffer.data_ptr())

    def before(self) -> list[tuple[str, torch.Tensor]]:
        """What buffers were when the step began."""
        return [(name, seen.value) for name, seen in self._before.items()]

    def changing(self) -> list[torch.Tensor]:
        """Those of them that every step makes anew: what differs there does not stay to be found later."""
        return [seen.value for name, seen in self._before.items() if name in self._known]

    def put_back(self) -> None:
        """What buffers were when the step began has been mended: so are those that no lane changes."""
        with torch.no_grad():
            for name, buffer in self._named().items():
                if name not in self._known and name not in self._after:
                    buffer.copy_(self._before[name].value)
                    self._before[name].version = buffer._version

    def lane_ended(self, lane: int) -> None:
        """Keep what a lane has made of buffers, and put back what was before it."""
        for name, buffer in self._named().items():
            if self._changed(name, buffer):
                self._after.setdefault(name, {})[lane] = buffer.detach().clone()
                with torch.no_grad():
                    buffer.copy_(self._before[name].value)
                self._before[name].version = buffer._version
                self._before[name].address = buffer.data_ptr()

    def end(self, transport: Transport, timeout_s: float | None) -> None:
        """All lanes of all ranks have run: give the buffers their new values. All ranks call it."""
        named = self._named()
        if not named:
            return
        names = sorted(named)
        flags = torch.tensor([name in self._after for name in names], dtype=torch.int32)
        if transport.size > 1:
            work = transport.all_reduce(flags, Op.MAX)
            finish(work, what="which buffers have changed", watch=transport.watch, timeout_s=timeout_s)
        with torch.no_grad():
            for name in (name for name, flag in zip(names, flags.tolist(), strict=True) if flag):
                self._known.add(name)
                self._combine(name, named[name], transport, timeout_s)

    def _combine(self, name: str, buffer: torch.Tensor, transport: Transport, timeout_s: float | None) -> None:
        """Every rank fills in its lanes, and zeros elsewhere; the patterns are then added up as integers, exactly."""
        mean = buffer.dtype.is_floating_point
        wide = torch.promote_types(buffer.dtype, torch.float32) if mean else torch.int64
        before, made = self._before[name].value, self._after.get(name, {})
        rows = torch.zeros((self._lanes.count, buffer.numel()), dtype=wide, device=buffer.device)
        for lane in self._lanes.mine:
            rows[lane] = made.get(lane, before).reshape(-1)
        if transport.size > 1:
            work = transport.all_reduce(rows.view(-1).view(_PATTERNS[wide.itemsize]), Op.SUM)
            finish(work, what=f"what lanes have made of {name}", watch=transport.watch, timeout_s=timeout_s)
        result = rows[0]
        if mean:  # where all lanes agree, the mean could still be rounded
            result = torch.where((rows == rows[0]).all(0), rows[0], tree_sum(list(rows)) / self._lanes.count)
        buffer.copy_(result.view(buffer.shape))

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        if name in self._known:
            return True
        seen = self._before[name]
        if (buffer._version, buffer.data_ptr()) != (seen.version, seen.address):
            return True
        return buffer.nbytes <= COMPARED_BYTES and not _equal(buffer, seen.value)

    def _named(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: also where something is not a number."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
