"""Buffers in lanes, such as running statistics: their values do not depend on the world size.

The rule: every lane of a step begins with the same buffers. Afterwards a buffer that some lane has changed becomes the
mean of its values after each lane, added up in the order of the tree over lane numbers; if it holds neither real
nor complex numbers, its value after lane 0. A buffer that appears, disappears, or changes its shape or dtype while
lanes run is treated as a cache of forward(): it is not changed, and a warning is logged.
"""

import logging
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from paceline.collectives.group import Group
from paceline.collectives.protocols import Op
from paceline.collectives.tree_sum import tree_sum
from paceline.reducer.lanes import Lanes

logger = logging.getLogger("paceline")

_PATTERNS = {4: torch.int32, 8: torch.int64}
COMPARED_BYTES = 1 << 20  # up to here buffers are compared by value: some torch kernels do not count versions
_NORMS = (nn.modules.batchnorm._NormBase,)  # modules whose buffers those are: these are compared at any size


@dataclass(slots=True)
class _Seen:
    """A buffer at the start of the step."""

    value: torch.Tensor
    version: int
    address: int

    @classmethod
    def now(cls, buffer: torch.Tensor) -> "_Seen":
        return cls(buffer.detach().clone(), buffer._version, buffer.data_ptr())

    def fits(self, buffer: torch.Tensor | None) -> bool:
        """Whether a buffer could be given the old value again."""
        return (
            buffer is not None
            and (buffer.shape, buffer.dtype, buffer.device) == (self.value.shape, self.value.dtype, self.value.device)
            and _is_plain(buffer)
        )


class LaneBuffers:
    """The buffers of one module, from lane to lane. Holds no module: a module may hold the replica."""

    def __init__(self, module: nn.Module, ignored: set[str], lanes: Lanes) -> None:
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._lanes = lanes
        norms = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _NORMS)]
        self._of_norms = {f"{name}.{own}".lstrip(".") for name, layer in norms for own, _ in layer.named_buffers()}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset for another set of ranks, which share no history of lanes."""
        self._find_owners()
        # Equal on all ranks.
        self._names = sorted(name for name, buffer in self._present().items() if _is_plain(buffer))
        self._caches: set[str] = set(self._present()) - set(self._names)  # not changed
        self._known: set[str] = set()  # known to change, as agreed by all ranks, so that they need not be compared
        self._careful = True  # until one full step has run, large ones are compared by value too
        self._unfit: set[str] = set()  # found in this step, not agreed yet
        self._before: dict[str, _Seen] = {}
        self._after: dict[str, dict[int, torch.Tensor]] = {}  # by name and lane: the value after the lane

    def begin(self) -> None:
        """A step begins: remember the buffers."""
        self._find_owners()
        present = self._present()
        self._after.clear()
        for name in self._names:
            buffer, seen = present.get(name), self._before.get(name)
            if buffer is None:
                self._before.pop(name, None)
            elif seen is None or not seen.fits(buffer) or self._changed(name, buffer):
                self._before[name] = _Seen.now(buffer)

    def before(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers at the start of the step."""
        return [(name, self._before[name].value) for name in self._names if name in self._before]

    def __contains__(self, name: str) -> bool:
        """Whether there was such a buffer when the step began."""
        return name in self._before

    def now(self, name: str) -> torch.Tensor:
        """The value of a buffer at the start of the step, before any lane ran. A large one is checked again, because a
        memory fault does not change its version."""
        seen = self._before[name]
        if seen.value.nbytes > COMPARED_BYTES and name not in self._known:
            buffer = self._present().get(name)
            if buffer is not None and seen.fits(buffer) and not _equal(buffer, seen.value):
                seen = self._before[name] = _Seen.now(buffer)
        return seen.value

    def changing(self) -> list[torch.Tensor]:
        """The buffers that every step replaces: a difference in these would not remain to be found later."""
        return [value for name, value in self.before() if name in self._known]

    def put_back(self) -> None:
        """The saved buffers have been healed: restore those that no lane changes."""
        present = self._present()
        for name in self._names:
            seen = self._before.get(name)
            if name not in self._known and name not in self._after and seen and seen.fits(present.get(name)):
                self._restore(name, present[name])

    def lane_ended(self, lane: int) -> None:
        """Keep the buffers after a lane, and restore those before it."""
        present = self._present()
        changed = []
        for name in self._names:
            buffer, seen = present.get(name), self._before.get(name)
            if buffer is None or seen is None or not seen.fits(buffer):
                self._unfit.add(name)
            elif self._changed(name, buffer):
                self._after.setdefault(name, {})[lane] = buffer.detach().clone()
                changed.append(name)
        for name in changed:  # after keeping all of them, because some may share memory
            self._restore(name, present[name])
        for name in present.keys() - set(self._names) - self._caches:
            self._take_for_cache(name)

    def lane_repeated(self) -> None:
        """A lane of another rank was repeated here: restore the buffers before it, and keep nothing."""
        after, unfit = self._after, set(self._unfit)
        self._after = {}
        self.lane_ended(-1)
        self._after, self._unfit = after, unfit

    def end(self, group: Group) -> None:
        """All lanes of all ranks have run: give the buffers their new values. All ranks call it."""
        if not self._names:
            return
        flags = torch.tensor(
            [2 * (n in self._unfit) or n in self._after for n in self._names], dtype=torch.int32, device="cpu"
        )
        if group.size > 1:
            group.wait(group.transport.all_reduce(flags, Op.MAX), "which buffers have changed")
        present = self._present()
        for name, flag in zip(list(self._names), flags.tolist(), strict=True):
            if flag == 1:
                self._known.add(name)
                self._combine(name, present[name], group)
            elif flag == 2:
                self._names.remove(name)
                self._take_for_cache(name)
        self._unfit.clear()
        self._careful = False

    @torch.no_grad()
    def _combine(self, name: str, buffer: torch.Tensor, group: Group) -> None:
        """Every rank fills in its lanes, with zeros elsewhere; the patterns are then added up as integers, exactly."""
        mean = buffer.dtype.is_floating_point or buffer.dtype.is_complex
        wide = _wide(buffer.dtype) if mean else torch.int64
        before, made = self._before[name].value, self._after.get(name, {})
        rows = torch.zeros((self._lanes.count, buffer.numel()), dtype=wide, device=buffer.device)
        for lane in self._lanes.mine:
            rows[lane] = made.get(lane, before).reshape(-1)
        if group.size > 1:
            real = torch.view_as_real(rows) if wide.is_complex else rows
            work = group.transport.all_reduce(real.view(-1).view(_PATTERNS[real.itemsize]), Op.SUM)
            group.wait(work, f"the values of {name} after each lane")
        result = rows[0]
        if mean:  # if all lanes agree, the mean could still be rounded
            result = torch.where((rows == rows[0]).all(0), rows[0], tree_sum(list(rows)) / self._lanes.count)
        buffer.copy_(result.view(buffer.shape))

    @torch.no_grad()
    def _restore(self, name: str, buffer: torch.Tensor) -> None:
        seen = self._before[name]
        if buffer.data_ptr() == seen.address:
            buffer.copy_(seen.value)
        else:  # forward has replaced the tensor, perhaps by its input or a parameter
            buffer = seen.value.clone()
            prefix, _, own_name = name.rpartition(".")
            setattr(self._owners[prefix](), own_name, buffer)
        seen.version, seen.address = buffer._version, buffer.data_ptr()

    def _changed(self, name: str, buffer: torch.Tensor) -> bool:
        if name in self._known:
            return True
        seen = self._before[name]
        if (buffer._version, buffer.data_ptr()) != (seen.version, seen.address):
            return True
        by_value = self._careful or name in self._of_norms or buffer.nbytes <= COMPARED_BYTES
        return by_value and not _equal(buffer, seen.value)

    def _take_for_cache(self, name: str) -> None:
        self._caches.add(name)
        logger.warning(
            "the buffer %s appeared, disappeared, or changed its shape or dtype while lanes ran, so it is treated as a "
            "cache of forward() and left as each lane leaves it; if results depend on it, register it with its final "
            "shape and dtype in __init__",
            name,
        )

    def compared(self) -> "list[tuple[str, _ComparedBuffer]]":
        """The tensors compared between ranks: the buffers at the start of the step."""
        return [(name, _ComparedBuffer(self, name, was)) for name, was in self.before()]

    def _find_owners(self) -> None:
        """Once a step, because walking over all modules after every lane costs too much."""
        module = self._module()
        named = () if module is None else module.named_modules()
        self._owners = {prefix: weakref.ref(owner) for prefix, owner in named}

    def _present(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, known in self._owners.items():
            owner = known()
            for own_name, buffer in () if owner is None else owner._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                name = f"{prefix}.{own_name}" if prefix else own_name
                if name not in self._ignored:
                    found[name] = buffer
        return found


class _ComparedBuffer:
    """A buffer at the start of the step. When its first piece is compared, all of it is read."""

    def __init__(self, buffers: LaneBuffers, name: str, value: torch.Tensor) -> None:
        self._buffers = buffers
        self._name = name
        self._value = value

    def __call__(self, begins: bool) -> torch.Tensor:
        if begins and self._name in self._buffers:
            self._value = self._buffers.now(self._name)
        return self._value


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether every element has its own memory and can be written to."""
    return buffer.layout is torch.strided and all(
        s != 0 or n <= 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a mean is computed. torch does not promote 8-bit types."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, including NaN."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
