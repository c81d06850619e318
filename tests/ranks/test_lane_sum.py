"""The sum over lanes: whoever runs which lanes, over whatever transport, the bits are those of the tree over lanes."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.collectives import LocalTransport, ThreadTransport, Transport, run
from paceline.collectives.protocols import Traits
from paceline.collectives.reduction import GradBucket
from paceline.errors import UsageError
from paceline.strategies.lane_sum import LaneSum
from tests.lane_buckets import CPU, FLOATS, expected_sum, lane_bucket, summed


class NoTree(ThreadTransport):
    """A transport that moves slices and cannot add in the tree, as gloo between more than 2 ranks."""

    def traits(self, device: torch.device) -> Traits:
        return replace(super().traits(device), tree_sum=False)


@given(
    size=st.integers(1, 5),
    lanes=st.integers(1, 9),
    numel=st.one_of(st.integers(0, 12), st.integers(0, 1000)),
    dtype=st.sampled_from(FLOATS),
    native=st.booleans(),
)
@example(size=4, lanes=8, numel=1000, dtype=torch.bfloat16, native=True)
@example(size=4, lanes=8, numel=1001, dtype=torch.bfloat16, native=False)
@example(size=3, lanes=8, numel=1000, dtype=torch.float16, native=True)
@example(size=1, lanes=7, numel=10, dtype=torch.float32, native=True)
def test_the_bits_are_those_of_the_tree_over_lanes(
    size: int, lanes: int, numel: int, dtype: torch.dtype, native: bool
) -> None:
    def body(transport: ThreadTransport) -> torch.Tensor:
        over = transport if native else NoTree(transport._world, transport.rank, size)
        return summed(over, [lane_bucket(over, lanes, numel, dtype)], lanes)[0]

    expected = expected_sum(lanes, numel, dtype)
    assert not expected.isnan().any()
    assert all(torch.equal(got, expected) for got in run(body, size))


@pytest.mark.parametrize(
    ("size", "lanes", "multi_step"),
    [
        *[(1, 8, False), (2, 8, False), (4, 8, False), (8, 8, False), (3, 6, False), (5, 5, False), (4, 7, False)],
        *[(3, 8, True), (2, 6, True), (5, 8, True)],
    ],
)
def test_one_collective_is_enough_where_blocks_are_ranks(size: int, lanes: int, multi_step: bool) -> None:
    def body(transport: Transport) -> bool:
        return LaneSum(lanes, transport, CPU).multi_step

    assert run(body, size) == [multi_step] * size
    assert LaneSum(lanes).multi_step, "the transport is not known"


def test_several_buckets_fly_at_once() -> None:
    def body(transport: Transport) -> list[torch.Tensor]:
        return summed(transport, [lane_bucket(transport, 4, numel, torch.float32) for numel in (3, 40)], 4)

    for got in run(body, 2):
        assert torch.equal(got[0], expected_sum(4, 3, torch.float32))
        assert torch.equal(got[1], expected_sum(4, 40, torch.float32))


def test_blocks_of_other_lanes_are_refused() -> None:
    transport = LocalTransport()
    flat = torch.zeros(3)
    for blocks in ([], [((0, 2), flat)], [((0, 4), torch.zeros(3))]):
        with pytest.raises(UsageError, match=r"rank 0 of 1 was expected to contribute blocks \[\(0, 4\)\]"):
            LaneSum(4, transport, CPU)(GradBucket(0, flat, [flat], [flat], last=True, blocks=blocks), transport)
    with pytest.raises(UsageError, match="lanes must be at least 1, got 0"):
        LaneSum(0)


def test_another_transport_needs_another_lane_sum() -> None:
    reduction = copy.deepcopy(LaneSum(4, LocalTransport(), CPU))

    def body(transport: Transport) -> None:
        with pytest.raises(UsageError, match="was made for another transport than that of rank"):
            reduction(lane_bucket(transport, 4, 3, torch.float32), transport)

    assert not reduction.multi_step
    run(body, 3)


def test_a_group_that_can_do_neither_is_refused() -> None:
    class Neither(LocalTransport):
        def traits(self, device: torch.device) -> Traits:
            return replace(super().traits(device), tree_sum=False, all_to_all=False)

    with pytest.raises(UsageError, match="lanes=8 over 1 ranks .* cannot exchange slices"):
        LaneSum(8).check_transport(Neither(), CPU)
