"""The mean over all ranks of which each keeps its shards: half the bytes of an all-reduce."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch

from paceline.collectives.protocols import Op, ScatteringTransport, ShardedTransport, Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.spare_memory import SpareMemory
from paceline.collectives.stream_work import used_here
from paceline.collectives.subgroup import ShardGroups
from paceline.layout import aligned
from paceline.placement import Span
from paceline.strategies.multi_step import SideStream, SteppedWork, Steps

_HALF = (torch.float16, torch.bfloat16)
PIECE_BYTES = 8 << 20
Parts = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ScatterMean:
    """The mean of each rank's spans of a bucket: reduced in place by the backend, or by an exchange of shards,
    which are then added in rank order. `dtype`: the type in which they are added; None: the transport decides."""

    dtype: torch.dtype | None = None
    spare: SpareMemory = field(default_factory=SpareMemory, compare=False, repr=False)
    multi_step: ClassVar[bool] = False
    trivial_alone: ClassVar[bool] = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return _divides(self.dtype, transport, device)

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat, spans, traits = bucket.buffer(), bucket.spans, transport.traits(bucket.buffer().device)
        op = Op.MEAN if self.divides(transport, flat.device) else Op.SUM
        if not traits.sharded and (traits.reduce_scatter or traits.all_to_all):
            scatter = _Scatter(flat, _parts(flat, spans), op, transport, self.dtype, self.spare)
            return Flight(scatter.work, lambda: scatter.put(scatter.total()))
        summed = _cast(flat, self.dtype, in_float32=traits.sharded and flat.dtype in _HALF)
        if traits.sharded:
            work = cast(ShardedTransport, transport).reduce_scatter(summed, spans, op)
        else:
            work = transport.all_reduce(summed, op)
        return Flight(work) if summed is flat else Flight(work, lambda: _take(flat, summed))


class HybridMean:
    """The same if shards span only some of the ranks: the ranks of a shard group exchange shards and add them up, and
    then the ranks that hold the same shard add up theirs. So only one shard per rank travels between shard groups."""

    trivial_alone = True

    def __init__(self, groups: ShardGroups, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._groups = groups
        self._dtype = dtype
        self._side = SideStream()
        self._spare = SpareMemory()
        self._queues = device.type == "cuda" and groups.shard.transport.traits(device).stream_ordered
        self.multi_step = not self._queues

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return _divides(self._dtype, self._groups.twins.transport, device)

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        steps, flat = self._steps(bucket.buffer(), bucket.spans), bucket.buffer()
        return Flight(self._side.run(steps, flat.device, uses=[flat]) if self._queues else SteppedWork(steps))

    def _steps(self, flat: torch.Tensor, spans: Sequence[Sequence[Span]]) -> Steps:
        shard, twins = self._groups.shard.transport, self._groups.twins.transport
        op = Op.MEAN if self.divides(twins, flat.device) else Op.SUM
        if shard.traits(flat.device).sharded:
            summed = _cast(flat, self._dtype, in_float32=False)
            yield cast(ShardedTransport, shard).reduce_scatter(summed, spans, op)
            if own := _parts(flat, spans)[shard.rank]:
                total = torch.cat(_parts(summed, spans)[shard.rank])
                yield twins.all_reduce(total, op)
                _put(own, total)
            return
        # On a host, in pieces: received data needs memory beside the bucket, and this keeps it small.
        most = PIECE_BYTES // flat.itemsize // shard.size if flat.device.type == "cpu" else flat.numel()
        for parts in _windows(_parts(flat, spans), most):
            scatter = _Scatter(flat, parts, op, shard, self._dtype, self._spare)
            yield scatter.work
            total = scatter.total().to(self._dtype or flat.dtype)
            if total.numel():  # the twins have the same parts, so all of them or none
                yield twins.all_reduce(total, op)
            scatter.put(total)


def _divides(dtype: torch.dtype | None, transport: Transport, device: torch.device) -> bool:
    # float16 overflows above 65504, and a transport may add before it divides.
    return dtype not in (None, torch.float16) or transport.traits(device).native_mean


def _cast(flat: torch.Tensor, dtype: torch.dtype | None, *, in_float32: bool) -> torch.Tensor:
    """The gradients in the type of the addition, unless the transport itself adds in that type (`in_float32`)."""
    return flat if dtype in (None, torch.float32 if in_float32 else flat.dtype) else flat.to(dtype)


class _Scatter:
    """Every rank sends every other rank its shard; received shards are added by the backend or here."""

    def __init__(
        self,
        flat: torch.Tensor,
        parts: Parts,
        op: Op,
        transport: Transport,
        dtype: torch.dtype | None,
        spare: SpareMemory,
    ) -> None:
        """`parts`: the parts of the gradients that each rank keeps."""
        self._own = parts[transport.rank]
        self._spare = spare
        self._on_host = flat.device.type == "cpu"
        sizes = [[part.numel() for part in of_rank] for of_rank in parts]
        width = aligned(max(map(sum, sizes)), flat.dtype)
        by_backend = transport.traits(flat.device).reduce_scatter
        # Here half precision is added in float32, and rounded once. Gradients that are added in a wider type are sent
        # unchanged.
        self._wide = dtype or (torch.float32 if flat.dtype in _HALF and not by_backend else flat.dtype)
        widens = not by_backend and torch.promote_types(flat.dtype, self._wide) is self._wide
        kind = flat.dtype if widens else self._wide
        rows = 1 if by_backend else len(parts)
        counts = (len(parts) * width, rows * width)
        self._lent = [
            spare.take(count, kind) if self._on_host else flat.new_empty(count, dtype=kind) for count in counts
        ]
        sent, received = (memory[:count] for memory, count in zip(self._lent, counts, strict=True))
        for row, of_rank, own_sizes in zip(sent.view(len(parts), width), parts, sizes, strict=True):
            if of_rank:
                torch._foreach_copy_(list(row[: sum(own_sizes)].split(own_sizes)), list(of_rank))
        if by_backend:
            self.work = cast(ScatteringTransport, transport).reduce_scatter_tensor(received, sent, op)
        else:
            self.work = transport.all_to_all(received, sent)
        self._divide_by = transport.size if op is Op.MEAN and not by_backend else 1
        self._rows = received.view(rows, width)[:, : sum(sizes[transport.rank])]

    def total(self) -> torch.Tensor:
        """The sums of this rank's parts, concatenated."""
        total = self._rows[0].to(self._wide)
        for row in self._rows[1:]:
            total.add_(row)
        if self._divide_by > 1:
            total.div_(self._divide_by)
        return total

    def put(self, total: torch.Tensor) -> None:
        """Store the total in the parts."""
        if self._own:
            _put(self._own, total)
        for memory in self._lent:
            used_here(memory)
            if self._on_host:
                self._spare.give_back(memory)


def _parts(flat: torch.Tensor, spans: Sequence[Sequence[Span]]) -> list[list[torch.Tensor]]:
    return [[flat[begin:end] for begin, end in of_rank] for of_rank in spans]


def _windows(parts: Parts, most: int) -> Iterator[list[list[torch.Tensor]]]:
    """The same parts in pieces of at most `most` elements for each rank."""
    for begin in range(0, max(sum(part.numel() for part in of_rank) for of_rank in parts), most):
        yield [list(_window(of_rank, begin, begin + most)) for of_rank in parts]


def _window(parts: Sequence[torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    """The elements from `begin` to `end` of the concatenated flat parts."""
    at = 0
    for part in parts:
        piece = part[max(0, begin - at) : max(0, end - at)]
        if piece.numel():
            yield piece
        at += part.numel()


def _put(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    torch._foreach_copy_(list(parts), list(total.split([part.numel() for part in parts])))


def _take(flat: torch.Tensor, summed: torch.Tensor) -> None:
    flat.copy_(summed)
    used_here(summed)
