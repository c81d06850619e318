"""Loader with lanes: which samples a lane gets in which step does not depend on the world, nor on resumes."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.blocks import lanes_of
from paceline.data import Loader, order, read_sample_log
from paceline.errors import UsageError
from tests.unit.test_data_loader import Dice
from tests.unit.test_data_stream import MANY_THREADS, Count
from tests.unit.test_sampler import Numbers

Micros = list[torch.Tensor]
Dealt = dict[tuple[int, int], list[int]]  # by step and lane
LANES = 8
SIZES = (1, 2, 3, 5, 8)


def loader(data: Any, batch_size: int = 2, **more: Any) -> Loader[Any]:
    return Loader(data, batch_size, **{"rank": 0, "world_size": 1, "lanes": LANES, **more})


def of_lanes(steps: Iterable[tuple[int, Micros]], rank: int, size: int) -> Dealt:
    own = lanes_of(rank, size, LANES)
    return {
        (step, lane): microbatch.tolist()
        for step, microbatches in steps
        for lane, microbatch in zip(own, microbatches, strict=True)
    }


def dealt(data: Any, sizes: Iterable[tuple[int, int]], batch_size: int, **more: Any) -> Dealt:
    """What worlds that follow each other give to lanes: (size, steps) for each, over as many epochs as that takes."""
    found: Dealt = {}
    state: dict[str, Any] | None = None
    step = 0
    for size, steps in sizes:
        states = []
        for rank in range(size):
            ours = loader(data, batch_size, rank=rank, world_size=size, **more)
            if state:
                ours.load_state_dict(state)
            got = of_lanes(enumerate(islice(ours.endless(), steps), start=step), rank, size)
            assert not found.keys() & got.keys()
            found |= got
            states.append(ours.state_dict())
        assert states == [states[0]] * size
        state, step = json.loads(json.dumps(states[0])), step + steps
    return found


@settings(max_examples=30)
@given(
    samples=st.integers(24, 100),
    batch_size=st.integers(1, 3),
    shuffle=st.booleans(),
    worlds=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_lanes_get_the_same_in_every_world_and_after_every_resume(
    samples: int, batch_size: int, shuffle: bool, worlds: list[tuple[int, int]]
) -> None:
    steps = sum(count for _, count in worlds)
    for data, more in ((Numbers(samples), {"shuffle": shuffle}), (Count(samples), {})):
        alone = dealt(data, [(1, steps)], batch_size, **more)
        assert len(alone) == steps * LANES
        assert dealt(data, worlds, batch_size, **more) == alone


def test_a_lane_has_its_slice_of_the_global_batch() -> None:
    samples = order(0, 0, 40).tolist()
    for size in SIZES:
        found = dealt(Numbers(40), [(size, 2)], 2)
        assert [index for key in sorted(found) for index in found[key]] == samples[:32]
        stream = dealt(Count(40), [(size, 2)], 2)
        assert stream == {(step, lane): [16 * step + lane + 8 * i for i in (0, 1)] for step, lane in found}


def test_length_position_and_sample_log_count_steps(tmp_path: Path) -> None:
    ranks = [loader(Numbers(40), rank=rank, world_size=3, sample_log=tmp_path) for rank in range(3)]
    for ours in ranks:
        steps = iter(ours)
        next(steps)
        assert (len(ours), ours.left, ours.cursor.committed, ours.batch_size) == (2, 1, 16, 2)
        assert [len(microbatch) for microbatch in next(steps)] == [2] * len(lanes_of(ours._settings.rank, 3, LANES))
        assert next(steps, None) is None and ours.epoch == 1
    reading = read_sample_log(tmp_path)
    assert reading.problems() == []
    assert sorted(reading.counts(0)) == sorted(order(0, 0, 40).tolist()[:32])


@pytest.mark.filterwarnings(MANY_THREADS)
@pytest.mark.parametrize("data", [Numbers(50), Count(50)], ids=["indices", "a stream"])
def test_workers_make_the_same_micros(data: Any) -> None:
    assert dealt(data, [(2, 3)], 2, num_workers=2, prefetch_factor=3) == dealt(data, [(3, 3)], 2)


def test_augmentation_belongs_to_samples_and_micros_are_collated_one_by_one() -> None:
    def rolled(size: int) -> list[Any]:
        ranks = [loader(Dice(), 3, rank=rank, world_size=size, collate_fn=tuple) for rank in range(size)]
        return [microbatch for ours in ranks for microbatch in next(iter(ours))]

    alone = rolled(1)
    assert [len(microbatch) for microbatch in alone] == [3] * LANES and {type(microbatch) for microbatch in alone} == {
        tuple
    }
    assert rolled(3) == rolled(8) == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 9}, "lanes=8 is smaller than the world of 9 ranks"),
        ({"drop_last": False}, "lanes=8 and drop_last=False contradict each other: lanes have equal weight"),
        ({"lanes": 0}, "lanes must be a whole number of at least 1, got 0"),
        ({"batch_size": 6}, r"fewer than one global batch of 48 \(batch_size=6 for each of 8 lanes\)"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(Numbers(40), **arguments)
