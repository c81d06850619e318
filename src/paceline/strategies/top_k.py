"""Only the largest gradients; the others accumulate until they are large."""

import math
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.collectives.protocols import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.stream_work import used_here
from paceline.errors import UsageError
from paceline.strategies.memory import ParamMemory, clear_unless_finite
from paceline.strategies.sparse import mean_of_rows


@dataclass(frozen=True, eq=False)
class TopK:
    """The mean of each rank's largest entries of a bucket. Each rank and replica needs its own.

    One collective per bucket: every rank sends `ratio` of the entries, with their indices, to all. All ranks add them
    in rank order, so the bits are equal.

    Args:
        ratio: the fraction of the entries of a bucket that is sent. An entry takes 4 bytes more than in a plain mean,
        and
            every rank gets those of all others: with n ranks it saves bytes below about 1 / n.
        error_feedback: add the entries that a step left out to the next one. Costs one more copy of the gradients.
    """

    ratio: float = 0.01
    error_feedback: bool = True
    memory: ParamMemory[torch.Tensor] = field(default_factory=ParamMemory, init=False, repr=False)

    multi_step = False
    trivial_alone = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"expected TopK with a ratio above 0 and at most 1, got {self.ratio}")

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def forget(self) -> None:
        """Drop the accumulated entries."""
        self.memory.clear()

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            return mean_of_rows(flat, transport)
        if flat.numel() >= 2**31:
            raise UsageError(f"TopK numbers entries in 32 bits, but bucket {bucket.index()} has {flat.numel()} of them")
        count = min(flat.numel(), math.ceil(self.ratio * sum(view.numel() for view in bucket.gradients())))
        if not count:
            return Flight(transport.all_reduce(flat, Op.MEAN))
        indices, values = self._choose(bucket, count)
        part = _packed(indices, values)
        gathered = part.new_empty(transport.size * part.numel())

        def result() -> None:
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32)).zero_()
            for row in gathered.view(transport.size, part.numel()):
                places, theirs = _unpacked(row, count, flat.dtype)
                wide.index_add_(0, places, theirs.to(wide.dtype))
            flat.copy_(wide.div_(transport.size))
            used_here(gathered)

        return Flight(transport.all_gather(gathered, part), result)

    def _choose(self, bucket: GradBucket, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of the largest entries, and the values to send. The rest is remembered."""
        flat = bucket.buffer()
        full = flat.to(torch.promote_types(flat.dtype, torch.float32))  # the bucket itself, unless it is narrow
        start = flat.storage_offset()
        slots = [
            (param, full.as_strided(view.shape, view.stride(), view.storage_offset() - start + full.storage_offset()))
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if self.error_feedback:
            for param, slot in slots:
                if (error := self.memory.get(param)) is not None:
                    slot.add_(error.to(slot))
        indices = full.abs().topk(count, sorted=False).indices
        chosen = full[indices]
        sent = chosen.to(flat.dtype)
        if self.error_feedback:
            full[indices] = chosen - sent  # zero, or the rounding error of a narrow dtype
            errors = [self.memory.of(param, partial(torch.empty_like, slot)).copy_(slot) for param, slot in slots]
            clear_unless_finite(chosen.abs().sum(), *errors)
        return indices.to(torch.int32), sent


def _packed(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Both as bytes, for one collective. Each is aligned to its type."""
    start = _aligned(indices.nbytes)
    packed = torch.zeros(start + _aligned(values.nbytes), dtype=torch.uint8, device=values.device)
    packed[: indices.nbytes] = indices.view(torch.uint8)
    packed[start : start + values.nbytes] = values.view(torch.uint8)
    return packed


def _unpacked(row: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    start = _aligned(4 * count)
    return row[: 4 * count].view(torch.int32), row[start : start + count * dtype.itemsize].view(dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
