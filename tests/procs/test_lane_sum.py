"""The sum over lanes between real processes: one result for every number of ranks, over shared memory and gloo."""

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import TorchDistTransport, Transport
from paceline.collectives.choose import choose
from tests.lane_buckets import CPU, FLOATS, expected_sum, lane_bucket, summed
from tests.pool import Pool

CASES = [(8, 1003, dtype) for dtype in FLOATS] + [
    (6, 5, torch.bfloat16),
    (5, 1, torch.float32),
    (8, 0, torch.float32),
]


def wrong_sums(transport: Transport) -> list[str]:
    wrong = []
    for lanes, numel, dtype in CASES:
        buckets = [lane_bucket(transport, lanes, numel, dtype) for _ in range(2)]
        expected = expected_sum(lanes, numel, dtype)
        wrong += [
            f"rank {transport.rank} of {transport.size}: {lanes} lanes, {numel} elements of {dtype}"
            for got in summed(transport, buckets, lanes)
            if not torch.equal(got, expected)
        ]
    return wrong


def body(rank: int, size: int, wanted: str) -> list[str]:
    assert dist.group.WORLD is not None
    transport = choose(TorchDistTransport(dist.group.WORLD), wanted, [CPU], 20)
    wrong = wrong_sums(transport)
    transport.close()
    return wrong


@pytest.mark.parametrize("wanted", ["shm", "torch"])
def test_the_bits_do_not_depend_on_the_ranks(wanted: str, procs: Pool) -> None:
    for size in (2, 3, 4):
        assert procs(size).run(body, wanted) == [[]] * size
