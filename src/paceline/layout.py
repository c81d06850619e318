"""Where every gradient lives: buckets, offsets and padding, as one frozen value.

A layout is made from parameter metadata alone, without communication. The reducer allocates from it and everything
else that needs to know where a gradient is reads it.

    bucket 0        ┌── w3 ──┬pad┬ b3 ┬pad┐          order of `order`: the gradients that are ready first
    bucket 1        ├──────── w2 ─────────┬ b2 ┬pad┤
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from paceline.errors import UsageError

# Kernels choose vector widths by alignment, and so the order of their sums. With every gradient on a cache line, the
# same gradient is processed by the same kernel in every layout.
ALIGN_BYTES = 64

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """What a layout needs to know about one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the strides cover the elements exactly once, in some order, without a gap."""
        expected = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return True

    def view_of(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """The part of `flat` memory from `offset` on, shaped and strided like the parameter."""
        if self.dense:
            return flat.as_strided(self.shape, self.stride, flat.storage_offset() + offset)
        return flat[offset : offset + self.numel].view(self.shape)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device] | None:
        """Gradients of one kind may share a bucket. None: shares with no other."""
        return None if self.sparse else (self.dtype, self.device)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter's gradient in its bucket."""

    param: int  # index into Layout.params
    offset: int  # in elements
    numel: int


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One flat buffer of gradients that are reduced together. A sparse gradient has a bucket of its own."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    numel: int  # with padding
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they are launched."""

    params: tuple[ParamMeta, ...]
    buckets: tuple[BucketSpec, ...]

    def __post_init__(self) -> None:
        placed = sorted(slot.param for bucket in self.buckets for slot in bucket.slots)
        assert placed == list(range(len(self.params))), "every parameter has exactly one place"
        for bucket in self.buckets:
            end = 0
            for slot in bucket.slots:
                assert slot.offset >= end and slot.offset * bucket.dtype.itemsize % ALIGN_BYTES == 0
                end = slot.offset + slot.numel
            assert end <= bucket.numel

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets: what the gradients cost."""
        return sum(bucket.nbytes for bucket in self.buckets if not bucket.sparse)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Parameter indices in the order of their places."""
        return tuple(slot.param for bucket in self.buckets for slot in bucket.slots)


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """Upper sizes of buckets in bytes: `caps[i]` for the i-th bucket of one dtype and device, the last one repeated."""

    caps: tuple[int, ...]
    listed: bool = False  # the user named one size per bucket
    given: bool = False  # the user named a size

    def __post_init__(self) -> None:
        if not self.caps or any(cap <= 0 for cap in self.caps):
            raise UsageError(f"expected bucket sizes above zero, got {list(self.caps)} bytes")

    @classmethod
    def from_mib(cls, cap_mib: float | None, cap_mib_list: Sequence[float] | None) -> "BucketCaps":
        """torch's rule: 25 MiB with a first bucket of 1 MiB, unless the user names a size."""
        given = [cap for cap in (cap_mib, *(cap_mib_list or ())) if cap is not None]
        if bad := [cap for cap in given if not (isinstance(cap, (int, float)) and math.isfinite(cap) and cap > 0)]:
            raise UsageError(f"expected bucket sizes in MiB above zero, got {bad[0]!r}")
        if cap_mib_list:
            return cls(tuple(int(cap * MIB) for cap in cap_mib_list), listed=True, given=True)
        if cap_mib is not None:
            return cls((int(cap_mib * MIB),), given=True)
        return cls((1 * MIB, 25 * MIB))

    def of(self, position: int) -> int:
        return self.caps[min(position, len(self.caps) - 1)]


def aligned(numel: int, dtype: torch.dtype) -> int:
    """`numel`, rounded up to a multiple of ALIGN_BYTES."""
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    return -(-numel // align) * align


def plan_layout(params: Iterable[ParamMeta], order: Sequence[int], caps: BucketCaps) -> Layout:
    """Pack the gradients into buckets, in `order` (indices of parameters, earliest gradient first), by `caps`."""
    metas = tuple(params)
    return lay_groups(metas, cap_groups([(index, metas[index].kind, metas[index].nbytes) for index in order], caps))


def lay_groups(params: Iterable[ParamMeta], groups: Iterable[Sequence[int]]) -> Layout:
    """One bucket per group of parameter indices, in the order given, which is the order of launches."""
    metas = tuple(params)
    return Layout(metas, tuple(_bucket(index, group, metas) for index, group in enumerate(groups)))


def cap_groups(items: Iterable[tuple[int, Hashable | None, int]], caps: BucketCaps) -> list[list[int]]:
    """Group (parameter, kind, bytes), earliest gradient first: one kind per group, each gradient of kind None alone.

    A group closes when it has reached its cap. Groups are sorted by their last gradient, because that is when their
    buckets are full, and buckets are launched strictly in index order.
    """
    open_groups: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed_count: dict[Hashable, int] = {}
    groups: list[list[int]] = []
    position: dict[int, int] = {}

    for place, (param, kind, nbytes) in enumerate(items):
        position[param] = place
        if kind is None:
            groups.append([param])
            continue
        open_groups.setdefault(kind, []).append(param)
        open_bytes[kind] = open_bytes.get(kind, 0) + nbytes
        if open_bytes[kind] >= caps.of(closed_count.get(kind, 0)):
            groups.append(open_groups.pop(kind))
            closed_count[kind] = closed_count.get(kind, 0) + 1
            open_bytes[kind] = 0
    groups.extend(open_groups.values())
    return sorted(groups, key=lambda group: position[group[-1]])


def _bucket(index: int, group: Sequence[int], metas: Sequence[ParamMeta]) -> BucketSpec:
    first = metas[group[0]]
    if strange := [metas[param] for param in group[1:] if first.kind is None or metas[param].kind != first.kind]:
        raise UsageError(
            f"bucket {index} cannot hold both {first.name} and {strange[0].name}: gradients in one bucket have one "
            f"dtype and one device, and a sparse gradient has a bucket of its own"
        )
    slots: list[Slot] = []
    end = 0
    for param in group:
        slots.append(Slot(param, end, metas[param].numel))
        end += aligned(metas[param].numel, first.dtype)
    return BucketSpec(index, first.dtype, first.device, tuple(slots), end, first.sparse)
