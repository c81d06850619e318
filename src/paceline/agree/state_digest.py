"""What is compared in a step: which part of the state, and a digest of it that is equal where all bits are.

How a digest is made
--------------------
The bytes of a tensor are read as 64-bit integers and added up in rows of 127, wrapping around. The sums of rows, and
what fills no row, are mixed and multiplied, each by an odd number of its own, and added in turn. An odd factor loses
nothing modulo 2**64, and neither does mixing, so one changed bit always changes the digest. Integer sums do not depend
on the order of additions, so the number of threads does not matter. Changes in several places are missed only where
they cancel out: within one row of 1016 bytes, or by a chance of 2**-32 or less.

Rows have an odd length, because the top bit of a sum only tells whether an odd number of top bits changed: if float64
were added in rows of even length, a tensor of flipped signs would look like the tensor itself.

Small tensors are concatenated first, since a call costs more than their bytes. Several of them may lie in one row,
so each place of a row has a factor too.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from paceline.agree.state_parts import Locator, NamedState, cut
from paceline.errors import UsageError

ROW = 127
SMALL_BYTES = 32768
TABLE = 16384
_LOW_HALF = 0xFFFFFFFF
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements `begin` to `end` of a tensor, counted in row-major order whatever its strides are."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def flat(self) -> torch.Tensor:
        """The elements as one contiguous tensor. It shares memory with the tensor if that is contiguous."""
        tensor = self.tensor.detach()
        if tensor.is_contiguous():
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset() + self.begin)
        rows, before = self.rows(tensor)
        return rows.reshape(-1)[before : before + self.numel]

    def rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The fewest leading rows of `tensor` that hold the elements, and how many of theirs come before."""
        width = math.prod(tensor.shape[1:])
        if not self.numel:
            return tensor[:0], 0
        first, last = self.begin // width, -(-self.end // width)
        return tensor[first:last], self.begin - first * width


class StateReplaced(LookupError):
    """A tensor that was listed no longer exists, or has another shape or dtype now."""


class _Tracked(NamedTuple):
    """A tensor of the state, as it was listed."""

    name: str
    source: torch.Tensor | Locator
    shape: torch.Size
    dtype: torch.dtype

    def now(self, *, begins: bool) -> torch.Tensor | None:
        """The tensor that is there now, or None if its shape or dtype is another one."""
        tensor = self.source if isinstance(self.source, torch.Tensor) else self.source(begins)
        if tensor is None or tensor.shape != self.shape or tensor.dtype is not self.dtype or not readable(tensor):
            return None
        return tensor


class Rotation:
    """Cuts a state into `every` parts of about equal bytes: `part(step)` is what is compared at that step.

    The cuts follow from names, shapes and dtypes alone, so they are equal on all ranks. A tensor that is named twice
    (tied weights) is taken once. What has no plain memory to compare, such as a sparse tensor, is left out.
    """

    def __init__(self, named: NamedState, every: int) -> None:
        self._every = every
        self.renew(named)

    def renew(self, named: NamedState) -> None:
        """Replace the list: an optimizer has created its moments, or a checkpoint was loaded.

        All ranks do it before the same step. It is cheap, so it may be done whenever something could have changed.
        """
        seen: set[int] = set()
        self._tracked: list[_Tracked] = []
        for name, source in named:
            tensor = source if isinstance(source, torch.Tensor) else source(False)
            if tensor is not None and readable(tensor) and id(tensor) not in seen:
                self._tracked.append(_Tracked(name, source, tensor.shape, tensor.dtype))
            seen.add(id(tensor))
        self._parts = cut([(one.shape.numel(), one.dtype.itemsize) for one in self._tracked], self._every)

    def signature(self) -> int:
        """A digest of names, shapes and dtypes: equal on two ranks whose lists are equal."""
        text = repr([(one.name, tuple(one.shape), one.dtype) for one in self._tracked])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)

    def part(self, step: int) -> list[Piece]:
        """What is compared at `step`. Raises StateReplaced if a tensor of it was replaced by one of another shape or
        dtype: then there is nothing to compare until the list is renewed."""
        pieces = []
        for index, begin, end in self._parts[step % self._every]:
            tracked = self._tracked[index]
            if (tensor := tracked.now(begins=begin == 0)) is None:
                raise StateReplaced(tracked.name)
            pieces.append(Piece(tracked.name, tensor, begin, end))
        return pieces

    def whole(self) -> list[Piece]:
        """All of the state, a piece for each tensor."""
        found = [(one.name, one.now(begins=False)) for one in self._tracked]
        return [Piece(name, tensor, 0, tensor.numel()) for name, tensor in found if tensor is not None]


def state_digest(tensors: Sequence[torch.Tensor]) -> int:
    """The digest of `tensors`, in their order: a signed 64-bit integer.

    It depends on bits, sizes and order, not on strides: a tensor and its contiguous copy have the same digest. Tensors
    on a device are waited for.
    """
    return start_digest(tensors).value()


class PendingDigest:
    """A digest that is being computed. On a CUDA device the current stream does that, and nothing waits for it."""

    def __init__(self, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        hashed = hashlib.blake2b(repr(sizes).encode(), digest_size=8).digest()
        self._sizes = int.from_bytes(hashed, "little")
        self._parts = list(parts)

    def value(self) -> int:
        """The digest. Waits for the device, if there is one."""
        found = self._sizes
        for part in self._parts:
            found = _mix64(found * 0x9E3779B97F4A7C15 + int(part))
        return found - (1 << 64) if found >> 63 else found

    def on_device(self) -> torch.Tensor | int:
        """A number that is equal for equal digests of tensors of the same sizes, where it was computed."""
        return self._parts[0] if len(self._parts) == 1 else self.value()


def start_digest(tensors: Sequence[torch.Tensor]) -> PendingDigest:
    """Start the digest of `tensors`; on the CPU it is then complete. The host never waits for a CUDA device here."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    with torch.no_grad():
        parts = [_device_digest(own, device) for device, own in by_device.items()]
    return PendingDigest([tensor.nbytes for tensor in tensors], parts)


def _device_digest(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The tensors of one device as one integer on it."""
    sums: list[torch.Tensor] = []
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not readable(tensor):
            raise UsageError(
                f"expected a dense tensor, got one of layout {tensor.layout} and dtype {tensor.dtype} on "
                f"{tensor.device}; leave it out of what is compared"
            )
        dtype, size = tensor.dtype, tensor.nbytes
        if size < SMALL_BYTES:
            if size:
                small.setdefault(dtype, []).append(tensor)
            continue
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)
        if rest := size % 8:
            rest //= dtype.itemsize
            small.setdefault(dtype, []).append(flat[-rest:])
            flat = flat[:-rest]
        if flat.storage_offset() * dtype.itemsize % 8:
            flat = flat.clone()  # it cannot be read as wider integers where it begins
        sums += _rows(flat.view(torch.int64))
    for dtype, several in small.items():
        size = sum(tensor.nbytes for tensor in several)
        # Never empty: a single tensor would come back as it is, aligned or not.
        filling = torch.zeros(max(1, (8 - size % 8) // dtype.itemsize), dtype=dtype, device=device)
        flat = torch._C._nn.flatten_dense_tensors([*several, filling])
        sums += _rows(flat.view(torch.int64), _factors(device))
    return _combine(torch.cat(sums)) if sums else torch.zeros((), dtype=torch.int64, device=device)


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory whose bits can be compared."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return plain and not hasattr(tensor, "to_local")


def _rows(values: torch.Tensor, factors: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The sums of all rows, and what is left. With `factors`, the places of a row are told apart."""
    count = values.numel() // ROW
    if not count:
        return [values]
    begin = values.storage_offset()
    rows = values.as_strided((count, ROW), (ROW, 1), begin)
    rest = values.as_strided((values.numel() - count * ROW,), (1,), begin + count * ROW)
    return [(rows if factors is None else rows * factors[:ROW]).sum(1), rest]


def _combine(values: torch.Tensor) -> torch.Tensor:
    """Any number of values as one."""
    factors = _factors(values.device)
    while True:
        # Mixed, so that top bits reach lower ones: sums alone would not tell two changed top bits from none.
        values = values ^ ((values >> 32) & _LOW_HALF)
        if values.numel() <= TABLE:
            return (values * factors[: values.numel()]).sum()
        values = torch.cat(_rows(values, factors))


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers, all different, the same on every rank."""
    values = [_mix64((number + 1) * 0x9E3779B97F4A7C15) | 1 for number in range(TABLE)]
    return torch.tensor([v - (1 << 64) if v >> 63 else v for v in values], dtype=torch.int64, device=device)


def _mix64(value: int) -> int:
    """A number below 2**64 as another one that shares no pattern with it (the end of splitmix64)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
