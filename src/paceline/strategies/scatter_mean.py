"""The mean over all ranks where each keeps its shards of it: half of what an all_reduce moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from paceline.collectives.protocols import Op, ScatteringTransport, ShardedTransport, Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.stream_work import used_here
from paceline.placement import Span


@dataclass(frozen=True, slots=True)
class ScatterMean:
    """The mean of each rank's spans of a bucket: reduced where they are, by the backend, or by an exchange of shards,
    which are then added in the order of ranks."""

    multi_step: ClassVar[bool] = False
    trivial_alone: ClassVar[bool] = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return transport.traits(device).native_mean

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat, traits = bucket.buffer(), transport.traits(bucket.buffer().device)
        op = Op.MEAN if traits.native_mean else Op.SUM
        if traits.sharded:
            return Flight(cast(ShardedTransport, transport).reduce_scatter(flat, bucket.spans, op))
        if traits.reduce_scatter:
            return _by_reduce_scatter(flat, bucket.spans, op, cast(ScatteringTransport, transport))
        if traits.all_to_all:
            return _by_exchange(flat, bucket.spans, op, transport)
        return Flight(transport.all_reduce(flat, op))


def _by_reduce_scatter(
    flat: torch.Tensor, spans: Sequence[Sequence[Span]], op: Op, transport: ScatteringTransport
) -> Flight:
    """The backend adds up what all ranks have for this one."""
    rows, own = _rows(flat, spans, transport.rank)
    reduced = flat.new_empty(rows.shape[1])
    work = transport.reduce_scatter_tensor(reduced, rows.view(-1), op)

    def result() -> None:
        _put(own, reduced)
        used_here(rows)
        used_here(reduced)

    return Flight(work, result)


def _by_exchange(flat: torch.Tensor, spans: Sequence[Sequence[Span]], op: Op, transport: Transport) -> Flight:
    """Send every rank its spans, and add up what comes."""
    sent, own = _rows(flat, spans, transport.rank)
    rows = torch.empty_like(sent)
    work = transport.all_to_all(rows.view(-1), sent.view(-1))

    def result() -> None:
        half = flat.dtype in (torch.float16, torch.bfloat16)  # added in float32, and rounded once
        total = rows[0].float() if half else rows[0]
        for row in rows[1:]:
            total.add_(row)
        if op is Op.MEAN:
            total.div_(transport.size)
        _put(own, total)
        used_here(sent)
        used_here(rows)

    return Flight(work, result)


def _rows(flat: torch.Tensor, spans: Sequence[Sequence[Span]], rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A row for each rank, of its spans and then anything; and where those of `rank` are in the bucket."""
    parts = [[flat[begin:end] for begin, end in of_rank] for of_rank in spans]
    rows = flat.new_empty(len(parts), max(sum(part.numel() for part in of_rank) for of_rank in parts))
    for row, of_rank in zip(rows, parts, strict=True):
        if of_rank:
            sizes = [part.numel() for part in of_rank]
            torch._foreach_copy_(list(row[: sum(sizes)].split(sizes)), of_rank)
    return rows, parts[rank]


def _put(own: Sequence[torch.Tensor], reduced: torch.Tensor) -> None:
    if own:
        sizes = [part.numel() for part in own]
        torch._foreach_copy_(list(own), list(reduced[: sum(sizes)].split(sizes)))
