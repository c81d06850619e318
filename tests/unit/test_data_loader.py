"""Loader in one process: what it deals, what counts as committed, and going on elsewhere."""

import json
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from paceline.data import Cursor, Loader, order
from paceline.errors import IllegalMove, UsageError
from tests.unit.test_sampler import Endless, Numbers


def loader(length: int = 40, batch_size: int = 4, **more: Any) -> Loader[torch.Tensor]:
    return Loader(Numbers(length), batch_size, **{"rank": 0, "world_size": 1, **more})


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


class Dice(Dataset[list[float]]):
    """Samples with random augmentation, from three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), torch.rand(()).item(), random.random(), float(numpy.random.rand())]


class Whole(Dice):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in list.__iter__(indices)]


# ------------------------------------------------------------------------------------------------------------ dealing


@given(
    length=st.integers(9, 80),
    size=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_ranks_share_every_global_batch(
    length: int, size: int, batch_size: int, shuffle: bool, data: st.DataObject
) -> None:
    drop_last = data.draw(st.booleans()) if length >= size * batch_size else False
    settings: dict[str, Any] = {"world_size": size, "shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    ranks = [loader(length, batch_size, rank=rank, **settings) for rank in range(size)]
    samples = order(5, 0, length, shuffle=shuffle).tolist()
    dealt = [[batch.tolist() for batch in rank] for rank in ranks]
    for rank, batches in zip(ranks, dealt, strict=True):
        assert len(batches) == len(rank)
    for number in range(max(map(len, dealt))):
        parts = [batches[number] for batches in dealt if number < len(batches)]
        start = number * size * batch_size
        assert [index for part in parts for index in part] == samples[start : start + size * batch_size]
    if drop_last:
        assert {len(part) for batches in dealt for part in batches} == {batch_size}


def test_epochs_move_on_by_themselves_in_other_orders() -> None:
    ours = loader()
    assert flat(ours) == order(0, 0, 40).tolist()
    assert (ours.epoch, ours.cursor) == (1, Cursor(0, 1, 0))
    assert flat(ours) == order(0, 1, 40).tolist()


def test_set_epoch_chooses_and_does_not_lose_the_place_in_the_same_epoch() -> None:
    ours = loader()
    ours.set_epoch(3)
    assert flat(ours) == order(0, 3, 40).tolist()
    ours.set_epoch(0)
    first = next(iter(ours))
    ours.set_epoch(0)
    assert flat([first, *ours]) == order(0, 0, 40).tolist()


def test_an_iteration_goes_on_where_the_last_one_was_left() -> None:
    ours = loader()
    seen: list[int] = []
    for batch in ours:
        seen += batch.tolist()
        if len(seen) == 12:
            break
    assert (ours.left, len(ours)) == (7, 10)
    assert seen + flat(ours) == order(0, 0, 40).tolist()


def test_endless_goes_through_epochs() -> None:
    batches = loader(8, 4).endless()
    assert flat(next(batches) for _ in range(6)) == [i for epoch in range(3) for i in order(0, epoch, 8).tolist()]


def test_two_iterations_at_once_are_refused() -> None:
    ours = loader()
    first = iter(ours)
    next(first)
    next(iter(ours))
    with pytest.raises(IllegalMove, match="another one was started"):
        next(first)


def test_a_list_will_do_and_batches_are_collated_as_told() -> None:
    ours: Loader[str] = Loader(list("abcd"), 2, shuffle=False, rank=1, world_size=2, collate_fn="".join)
    assert list(ours) == ["cd"]


def test_without_a_group_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ours: Loader[torch.Tensor] = Loader(Numbers(8), 4, shuffle=False)
    assert flat(ours) == [4, 5, 6, 7]


# ---------------------------------------------------------------------------------------------------- what is committed


def test_a_batch_in_hand_counts_when_the_loop_never_commits() -> None:
    ours = loader()
    assert ours.cursor == Cursor(0, 0, 0)
    for number, _ in enumerate(ours, start=1):
        assert ours.cursor == Cursor(0, 0, 4 * number)
    assert ours.cursor == Cursor(0, 1, 0)


def test_a_loop_that_commits_decides_by_itself() -> None:
    ours = loader(manual_commit=True)
    seen = []
    for number, _ in enumerate(ours, start=1):
        before = ours.cursor.committed
        if number % 3 == 0:
            ours.commit()
        seen.append((before, ours.cursor.committed))
    assert seen == [(0, 0), (0, 0), (0, 12), (12, 12), (12, 12), (12, 24), (24, 24), (24, 24), (24, 36), (36, 36)]
    assert ours.cursor == Cursor(0, 0, 36)  # the last batch of the epoch has not been stepped on
    ours.commit()
    assert ours.cursor == Cursor(0, 1, 0)


def test_the_first_commit_ends_counting_by_itself() -> None:
    ours = loader()
    batches = iter(ours)
    next(batches)
    ours.commit()
    next(batches)
    assert ours.cursor.committed == 4
    ours.commit()
    assert ours.cursor.committed == 8


def test_an_epoch_that_was_committed_to_its_end_is_over() -> None:
    ours = loader()
    for _ in ours:
        ours.commit()
    assert ours.cursor == Cursor(0, 1, 0)


def test_steps_of_an_optimizer_commit() -> None:
    ours = loader()
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    handle = ours.commit_on(optimizer)
    for number, batch in enumerate(ours, start=1):
        net(batch[:, None].float()).sum().backward()
        if number % 2 == 0:
            assert ours.cursor.committed == 4 * (number - 2)
            optimizer.step()
            assert ours.cursor.committed == 4 * number
    handle.remove()


# ------------------------------------------------------------------------------------------------------- going on later


@given(
    length=st.integers(60, 120),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_worlds_that_follow_each_other_deal_one_epoch(length: int, worlds: list[tuple[int, int, int]]) -> None:
    state: dict[str, Any] = {}
    dealt: list[int] = []
    for size, batch_size, batches in [*worlds, (3, 2, length)]:
        states = []
        for rank in range(size):
            ours = loader(length, batch_size, rank=rank, world_size=size, drop_last=False, seed=0 if state else 9)
            if state:
                ours.load_state_dict(state)
            running = iter(ours)
            for _ in range(min(batches, ours.left)):
                dealt += next(running).tolist()
            states.append(ours.state_dict())
        state = json.loads(json.dumps(states[0]))
    assert sorted(dealt) == list(range(length))


def test_loading_the_own_state_takes_back_what_was_not_committed() -> None:
    ours = loader()
    batches = iter(ours)
    first, second = next(batches), None
    ours.commit()
    second = next(batches)
    ours.load_state_dict(ours.state_dict())
    with pytest.raises(IllegalMove, match="the position was set"):
        next(batches)
    assert flat([first]) + flat(ours) == order(0, 0, 40).tolist()
    assert second is not None


def test_the_saved_seed_wins() -> None:
    ours = loader(seed=3)
    batches = iter(ours)
    done = flat([next(batches), next(batches)])
    other = loader(seed=4)
    other.load_state_dict(ours.state_dict())
    assert done + flat(other) == order(3, 0, 40).tolist()


def test_a_position_for_other_data_is_refused() -> None:
    ours = loader()
    next(iter(ours))
    state = ours.state_dict()
    with pytest.raises(UsageError, match="saved with length=40, but here it is 44"):
        loader(44).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with shuffle=True, but here it is False"):
        loader(shuffle=False).load_state_dict(state)
    with pytest.raises(UsageError, match="another version of torch"):
        loader().load_state_dict({**state, "order": "0" * 16})
    with pytest.raises(UsageError, match="it lacks committed, "):
        loader().load_state_dict({"version": 1})
    with pytest.raises(UsageError, match="version 2, expected 1"):
        loader().load_state_dict({**state, "version": 2})
    with pytest.raises(UsageError, match="committed=44, expected at most length=40"):
        loader().load_state_dict({**state, "committed": 44})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"committed": -4}, "has committed=-4, expected a whole number of at least 0"),
        ({"committed": 1.5}, "has committed=1.5, expected a whole number of at least 0"),
        ({"epoch": "3"}, "has epoch='3', expected a whole number of at least 0"),
        ({"epoch": True}, "has epoch=True, expected a whole number of at least 0"),
        ({"seed": None}, "has seed=None, expected a whole number;"),
        ({"step": [1]}, r"has step=\[1\], expected a whole number of at least 0"),
        ({"length": "40"}, "has length='40', expected a whole number of at least 0, or None"),
        ({"shuffle": 1}, "has shuffle=1, expected True or False"),
        ({"order": 7}, "has order=7, expected text"),
        ({"manual_commit": "no"}, "has manual_commit='no', expected True or False"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(wrong: dict[str, Any], message: str) -> None:
    ours = loader()
    state = ours.state_dict()
    with pytest.raises(UsageError, match=f"the Loader's state {message}"):
        ours.load_state_dict({**state, **wrong})
    assert ours.state_dict() == state


def test_a_state_is_a_dict() -> None:
    wrong: Any = [1, 2]
    with pytest.raises(UsageError, match=r"the state of a Loader must be a dict, .* got \[1, 2\]"):
        loader().load_state_dict(wrong)


# -------------------------------------------------------------------------------------------------- random numbers


def rolled(**more: Any) -> dict[int, list[float]]:
    ours: Loader[list[list[float]]] = Loader(Dice(), 4, **{"rank": 0, "world_size": 1, "collate_fn": list, **more})
    return {int(sample[0]): sample for batch in ours for sample in batch}


def test_random_augmentation_follows_from_seed_epoch_and_sample() -> None:
    alone = rolled()
    assert len({tuple(sample[1:]) for sample in alone.values()}) == 24
    assert alone != rolled(seed=1)
    in_threes: dict[int, list[float]] = {}
    for rank in range(3):
        torch.manual_seed(rank)
        in_threes |= rolled(rank=rank, world_size=3)
    assert in_threes == {index: alone[index] for index in in_threes}
    assert len(in_threes) == 24


def test_loading_leaves_the_random_numbers_of_the_loop_alone() -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    def seed() -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    seed()
    expected = numbers()
    seed()
    rolled()
    assert numbers() == expected
    seed()
    ours: Loader[Any] = Loader(Whole(), 4, rank=0, world_size=1)
    assert list(ours)
    assert numbers() == expected


def test_batches_fetched_whole_get_numbers_of_their_own() -> None:
    ours: Loader[list[list[float]]] = Loader(Whole(), 4, rank=0, world_size=1, collate_fn=list)
    assert len({sample[1] for batch in ours for sample in batch}) == 24


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 3, "world_size": 4}, "has 3 samples, fewer than the 4 ranks"),
        ({"length": 7, "world_size": 2}, r"fewer than one global batch of 8 \(batch_size=4 for each of 2 ranks\)"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, got 2.5"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2, got rank=2"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(**arguments)


def test_a_dataset_without_length_or_indices_is_refused() -> None:
    with pytest.raises(UsageError, match="Endless, which has no __len__"):
        Loader(Endless(), 4)
    with pytest.raises(UsageError, match="set, which has no __getitem__"):
        Loader({1, 2}, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epoch must be a whole number of at least 0, got -1"):
        loader().set_epoch(-1)


def test_an_error_of_the_dataset_is_the_loops() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise LookupError("no such file")

    ours: Loader[Any] = Loader(Broken(8), 4, rank=0, world_size=1)
    with pytest.raises(LookupError, match="no such file"):
        next(iter(ours))
    assert ours.cursor.committed == 0


# -------------------------------------------------------------------------------------------- going back, and following


def test_batches_that_were_not_committed_come_again() -> None:
    one: Loader[torch.Tensor] = Loader(Numbers(40), 4, manual_commit=True)
    batches = one.endless()
    first = next(batches).tolist()
    one.commit()
    second = next(batches).tolist()
    one.go_back()
    assert next(batches).tolist() == second
    one.commit()
    one.go_back()  # nothing to go back to
    rest = flat(next(batches) for _ in range(8))
    assert sorted(first + second + rest) == list(range(40))
    assert one.epoch == 0
    next(batches)
    assert one.epoch == 1


def test_going_back_over_the_end_of_an_epoch_is_going_back_into_it() -> None:
    one: Loader[torch.Tensor] = Loader(Numbers(8), 4, manual_commit=True, shuffle=False)
    batches = one.endless()
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    one.go_back()
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_loader_that_was_told_its_rank_cannot_follow_a_world() -> None:
    with pytest.raises(UsageError, match="leave them out"):
        loader().follow_group()


class Broken(Numbers):
    """Fails once."""

    fails = True

    def __getitem__(self, index: int) -> int:
        if index == 6 and self.fails:
            self.fails = False
            raise ZeroDivisionError
        return super().__getitem__(index)


def test_batches_for_ever_go_on_after_an_error() -> None:
    one: Loader[torch.Tensor] = Loader(Broken(8), 4, manual_commit=True, shuffle=False)
    batches = one.endless()
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert [next(batches).tolist() for _ in range(2)] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_batches_for_ever_begin_in_the_epoch_that_was_set() -> None:
    one: Loader[torch.Tensor] = Loader(Numbers(8), 4, manual_commit=True)
    one.set_epoch(2)
    batches = one.endless()
    assert len([next(batches) for _ in range(5)]) == 5
    assert one.epoch == 4
