"""The mean over all ranks where each keeps its shards of it: half of what an all_reduce moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from paceline.collectives.protocols import Op, ShardedTransport, Transport
from paceline.collectives.reduction import Flight, GradBucket, used_here
from paceline.placement import Span


@dataclass(frozen=True, slots=True)
class ScatterMean:
    """The mean of each rank's spans of a bucket: reduced where they are, or by an exchange of shards, which are then
    added in the order of ranks."""

    multi_step: ClassVar[bool] = False
    trivial_alone: ClassVar[bool] = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return transport.traits(device).native_mean

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat, traits = bucket.buffer(), transport.traits(bucket.buffer().device)
        op = Op.MEAN if traits.native_mean else Op.SUM
        if traits.sharded:
            return Flight(cast(ShardedTransport, transport).reduce_scatter(flat, bucket.spans, op))
        if not traits.all_to_all:
            return Flight(transport.all_reduce(flat, op))
        return _by_exchange(flat, bucket.spans, op, transport)


def _by_exchange(flat: torch.Tensor, spans: Sequence[Sequence[Span]], op: Op, transport: Transport) -> Flight:
    """Send every rank its spans, and add up what comes."""
    parts = [[flat[begin:end] for begin, end in of_rank] for of_rank in spans]
    sizes = [[part.numel() for part in of_rank] for of_rank in parts]
    width = max(map(sum, sizes))
    sent, rows = flat.new_empty(len(parts), width), flat.new_empty(len(parts), width)
    for row, of_rank, own_sizes in zip(sent, parts, sizes, strict=True):
        if of_rank:
            torch._foreach_copy_(list(row[: sum(own_sizes)].split(own_sizes)), of_rank)
    work = transport.all_to_all(rows.view(-1), sent.view(-1))

    def result() -> None:
        half = flat.dtype in (torch.float16, torch.bfloat16)  # added in float32, and rounded once
        total = rows[0].float() if half else rows[0]
        for row in rows[1:]:
            total.add_(row)
        if op is Op.MEAN:
            total.div_(transport.size)
        mine = transport.rank
        if parts[mine]:
            torch._foreach_copy_(parts[mine], list(total[: sum(sizes[mine])].split(sizes[mine])))
        used_here(sent)
        used_here(rows)

    return Flight(work, result)
