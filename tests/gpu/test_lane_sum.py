"""The sum over lanes on NCCL: the bits of one process, with all buckets queued at once on a stream beside."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import TorchDistTransport, finish
from paceline.strategies.lane_sum import LaneSum
from tests.gpu.ranks import on_nccl
from tests.lane_buckets import FLOATS, expected_sum, lane_bucket

NUMELS = (100_003, 2, 0, 1_000_000)


def sums_lanes(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    transport = TorchDistTransport(dist.group.WORLD)
    device = torch.device("cuda", torch.cuda.current_device())
    assert transport.traits(device).stream_ordered
    assert transport.traits(device).tree_sum is (size <= 2)
    for lanes in (4, 7, 8):
        for dtype in FLOATS:
            reduction = LaneSum(lanes, transport, device)
            assert not reduction.multi_step
            with torch.cuda.stream(torch.cuda.Stream()):
                buckets = [lane_bucket(transport, lanes, numel, dtype, device) for numel in NUMELS]
                flights = [reduction(bucket, transport) for bucket in buckets]
                results = [bucket.buffer() for bucket in buckets]
                buckets.clear()
                # What is allocated now must not get the memory of blocks that are still being read.
                for numel in NUMELS * 3:
                    torch.full((numel,), float("nan"), dtype=dtype, device=device)
                for flight in flights:
                    finish(flight.work, what="a bucket", watch=transport.watch, timeout_s=60)
                got = [result.cpu() for result in results]
            for numel, result in zip(NUMELS, got, strict=True):
                assert torch.equal(result, expected_sum(lanes, numel, dtype)), (lanes, dtype, numel)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_are_those_of_one_process(procs: Any, tmp_path: Path, size: int) -> None:
    procs(size).run(on_nccl, str(tmp_path / "store"), "cpu:gloo,cuda:nccl", sums_lanes, group=False, deadline_s=120)
