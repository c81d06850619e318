"""Buckets of lanes without a reducer, for tests of the sum over lanes on every transport."""

from collections.abc import Sequence

import torch

from paceline.blocks import aligned_blocks, lanes_of
from paceline.collectives import Transport, finish
from paceline.collectives.reduction import GradBucket
from paceline.collectives.tree_sum import tree_sum
from paceline.strategies.lane_sum import LaneSum
from tests.models import draw

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gradient(lane: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes, so that every order of additions has its own bits."""
    return (draw(lane, numel) * 10 ** draw(lane + 100, numel)).to(dtype)


def expected_sum(lanes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return tree_sum([gradient(lane, numel, dtype) for lane in range(lanes)])


def lane_bucket(
    transport: Transport, lanes: int, numel: int, dtype: torch.dtype, device: torch.device = CPU
) -> GradBucket:
    """A bucket as it is when the last lane of a rank is in: its blocks are folded, in memory of the transport."""
    flat = transport.allocate(numel, dtype, device)
    own = lanes_of(transport.rank, transport.size, lanes)
    blocks = []
    for first, width in aligned_blocks(own.start, len(own)):
        memory = flat if first + width == own.stop else transport.allocate(numel, dtype, device)
        memory.copy_(tree_sum([gradient(lane, numel, dtype) for lane in range(first, first + width)]))
        blocks.append(((first, width), memory))
    return GradBucket(0, flat, [flat], [flat], last=True, blocks=blocks)


def summed(transport: Transport, buckets: Sequence[GradBucket], lanes: int) -> list[torch.Tensor]:
    """All buckets reduced, side by side where they may be."""
    reduction = LaneSum(lanes, transport, CPU)
    reduction.check_transport(transport, CPU)
    flights = []
    for bucket in buckets:
        flights.append(reduction(bucket, transport))
        if reduction.multi_step:
            finish(flights[-1].work, what="a bucket", watch=transport.watch, timeout_s=20)
    for flight in flights:
        finish(flight.work, what="a bucket", watch=transport.watch, timeout_s=20)
        assert flight.result() is None
    return [bucket.buffer() for bucket in buckets]
