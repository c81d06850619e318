"""DistributedSampler: torch's order for every argument, and clear refusals."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DistributedSampler
from paceline.errors import UsageError


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


lengths = st.integers(0, 50)
sizes = st.integers(1, 9)
epochs = st.integers(0, 5)
seeds = st.integers(0, 2**31)


@given(length=lengths, size=sizes, shuffle=st.booleans(), drop=st.booleans(), seed=seeds, epoch=epochs, data=st.data())
def test_the_order_is_that_of_torch(
    length: int, size: int, shuffle: bool, drop: bool, seed: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    ours: DistributedSampler[int] = DistributedSampler(Numbers(length), size, rank, shuffle, seed, drop)
    theirs: TorchDistributedSampler[int] = TorchDistributedSampler(Numbers(length), size, rank, shuffle, seed, drop)
    ours.set_epoch(epoch)
    theirs.set_epoch(epoch)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)


@given(length=lengths, size=sizes, shuffle=st.booleans(), drop=st.booleans(), epoch=epochs)
def test_ranks_share_the_dataset(length: int, size: int, shuffle: bool, drop: bool, epoch: int) -> None:
    parts = []
    for rank in range(size):
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(length), size, rank, shuffle, drop_last=drop)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    assert len({len(part) for part in parts}) == 1
    dealt = [index for part in parts for index in part]
    if drop:
        assert len(set(dealt)) == len(dealt) == length - length % size
    else:
        assert set(dealt) == set(range(length))
        assert len(dealt) == -(-length // size) * size


def test_it_is_torchs_class_and_feeds_a_loader() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(6), num_replicas=2, rank=1, shuffle=False)
    assert isinstance(sampler, TorchDistributedSampler)
    batches = list(DataLoader(Numbers(6), batch_size=3, sampler=sampler))
    assert torch.equal(batches[0], torch.tensor([1, 3, 5]))


def test_without_a_group_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone: DistributedSampler[int] = DistributedSampler(Numbers(3), shuffle=False)
    assert list(alone) == [0, 1, 2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    third: DistributedSampler[int] = DistributedSampler(Numbers(6), shuffle=False)
    assert list(third) == [1, 4]
    assert (third.num_replicas, third.rank) == (3, 1)
    # One of the two may be given; the other still comes from the world.
    half: DistributedSampler[int] = DistributedSampler(Numbers(6), num_replicas=2)
    assert half.rank == 1


def test_the_group_decides_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(4))
        assert (sampler.num_replicas, sampler.rank) == (1, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank must be below num_replicas=2, got rank=2"),
        ({"num_replicas": 2, "rank": -1}, "rank must be a whole number of at least 0, got -1"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas must be a whole number of at least 1, got 0"),
        ({"num_replicas": 2.0, "rank": 0}, "num_replicas must be a whole number of at least 1, got 2.0"),
        ({"num_replicas": "2", "rank": 0}, "got '2'"),
        ({"num_replicas": 2, "rank": 0, "seed": 0.5}, "seed must be a whole number, got 0.5"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        DistributedSampler(Numbers(4), **arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(UsageError, match="Endless, which has no __len__"):
        DistributedSampler(Endless(), num_replicas=1, rank=0)


def test_a_bad_epoch_is_refused() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(4), num_replicas=1, rank=0)
    with pytest.raises(UsageError, match="epoch must be a whole number, got 'one'"):
        sampler.set_epoch("one")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ exactly once, and a position


def samplers(length: int, size: int, **more: Any) -> list[DistributedSampler[int]]:
    return [DistributedSampler(Numbers(length), size, rank, **more) for rank in range(size)]


@given(length=lengths, size=sizes, shuffle=st.booleans(), seed=seeds, epoch=epochs)
def test_exactly_once_deals_each_index_to_one_rank(
    length: int, size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    parts = []
    for sampler in samplers(length, size, shuffle=shuffle, seed=seed, exactly_once=True):
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(sampler) == len(parts[-1])
    assert sorted(index for part in parts for index in part) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_exactly_once_and_drop_last_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="exactly_once=True and drop_last=True contradict each other"):
        DistributedSampler(Numbers(4), 2, 0, drop_last=True, exactly_once=True)


@given(
    length=st.integers(1, 60),
    worlds=st.lists(st.tuples(sizes, st.integers(0, 5)), max_size=4),
    kind=st.sampled_from([{"exactly_once": True}, {"drop_last": True}, {}]),
    epoch=epochs,
)
def test_worlds_that_follow_each_other_share_one_epoch(
    length: int, worlds: list[tuple[int, int]], kind: dict[str, bool], epoch: int
) -> None:
    state: dict[str, Any] = {"seed": 3, "epoch": epoch, "committed": 0, "length": length}
    dealt: list[int] = []
    for size, samples in [*worlds, (2, length)]:
        states = []
        for sampler in samplers(length, size, seed=1, **kind):
            sampler.load_state_dict(state)
            expected = len(sampler)
            drawn = list(sampler)
            assert len(drawn) == expected
            # All is drawn ahead, as a DataLoader may do; only what is committed counts.
            dealt += drawn[:samples]
            sampler.commit(min(samples, len(drawn)))
            states.append(sampler.state_dict())
        state = states[0]
    times = Counter(dealt)
    if kind.get("exactly_once"):
        assert times == dict.fromkeys(range(length), 1)
    elif kind.get("drop_last"):
        assert set(times.values()) <= {1}
        assert length - len(times) < 9
    else:  # padded at the end, by fewer than there are ranks
        assert set(times) == set(range(length))
        assert len(dealt) - length < 9


def test_going_on_in_the_same_world_is_as_if_nothing_had_happened() -> None:
    for sampler, whole in zip(samplers(23, 4), samplers(23, 4), strict=True):
        sampler.commit(2)
        other: DistributedSampler[int] = DistributedSampler(Numbers(23), 4, sampler.rank)
        other.load_state_dict(sampler.state_dict())
        assert list(other) == list(whole)[2:]
        # The epoch after it is whole again.
        other.set_epoch(1)
        whole.set_epoch(1)
        assert (list(other), len(other)) == (list(whole), len(whole))


def test_a_state_for_another_dataset_is_refused() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(4), 1, 0)
    with pytest.raises(UsageError, match="a dataset of 5 samples, this one has 4"):
        sampler.load_state_dict({**sampler.state_dict(), "length": 5})
    with pytest.raises(UsageError, match="it lacks committed, length"):
        sampler.load_state_dict({"seed": 0, "epoch": 0})
    with pytest.raises(UsageError, match="the DistributedSampler's state has epoch='1', expected a whole number"):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": "1"})


def test_epochs_in_the_same_order_are_warned_of_once() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(4), 2, 1)
    next(iter(sampler))  # a look at the first sample is no epoch
    list(sampler)
    with pytest.warns(UserWarning, match=r"rank 1 of 2: .* set_epoch\(\) was never called"):
        list(sampler)
    list(sampler)


@pytest.mark.parametrize("more", [{"shuffle": False}, {"exactly_once": True}])
def test_evaluations_in_the_same_order_are_not(more: dict[str, bool]) -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(4), 2, 1, **more)
    assert list(sampler) == list(sampler)
