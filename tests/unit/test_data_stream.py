"""Streams: element i goes to rank i mod the world, and a stream can be gone on with in another world."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import Cursor, Loader, shard
from paceline.errors import UsageError

MANY_THREADS = "ignore:This process:DeprecationWarning"  # Python 3.12 about every fork


class Count(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Sharded(Count):
    """Deals by itself, as for a plain DataLoader."""

    def __iter__(self) -> Iterator[int]:
        return shard(range(self.length), 1, 2)


class Seeking(Count):
    """Can begin anywhere, and is told the epoch."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = 0
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        self.begun_at.append(start)
        return iter(range(1000 * self.epoch + start, 1000 * self.epoch + self.length))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def stream(data: Any, batch_size: int, **more: Any) -> Loader[torch.Tensor]:
    return Loader(data, batch_size, **{"rank": 0, "world_size": 1, **more})


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


@given(length=st.integers(0, 60), size=st.integers(1, 5), start=st.integers(0, 20))
def test_shard_deals_by_number(length: int, size: int, start: int) -> None:
    parts = [list(shard(range(length), rank, size, start=start)) for rank in range(size)]
    assert sorted(index for part in parts for index in part) == list(range(start, length))
    assert all(index % size == rank for rank, part in enumerate(parts) for index in part)


def test_shard_reads_the_world_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(shard("abcdef")) == ["b", "e"]


@pytest.mark.filterwarnings(MANY_THREADS)
def test_shard_deals_to_the_workers_of_a_rank() -> None:
    batches = list(DataLoader(Sharded(20), batch_size=None, num_workers=2))
    assert sorted(int(index) for index in batches) == list(range(1, 20, 2))


@given(
    length=st.integers(1, 70),
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_worlds_that_follow_each_other_read_one_stream(length: int, worlds: list[tuple[int, int, int]]) -> None:
    state: dict[str, Any] = {}
    dealt: list[int] = []
    done = 0
    for size, batch_size, batches in [*worlds, (3, 2, length)]:
        done = min(done + size * batch_size * batches, length)
        for rank in range(size):
            ours = stream(Count(length), batch_size, rank=rank, world_size=size, drop_last=False)
            if state:
                ours.load_state_dict(state)
            taken = flat(islice(ours, batches))
            assert all(index % size == rank for index in taken)
            # At the end of the stream some ranks have nothing left, and are past it.
            assert ours.cursor in (Cursor(0, 0, done), Cursor(0, 1, 0))
            dealt += taken
        state = {**ours.state_dict(), "epoch": 0, "committed": done}
    assert sorted(dealt) == list(range(length))


def test_dropping_the_last_leaves_whole_batches_on_all_ranks() -> None:
    parts = [list(stream(Count(23), 3, rank=rank, world_size=3)) for rank in range(3)]
    assert [[batch.tolist() for batch in part] for part in parts] == [
        [[0, 3, 6], [9, 12, 15]],
        [[1, 4, 7], [10, 13, 16]],
        [[2, 5, 8], [11, 14, 17]],
    ]


@pytest.mark.filterwarnings(MANY_THREADS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_make_the_same_batches_in_the_same_order(persistent: bool) -> None:
    alone = stream(Count(50), 4, rank=1, world_size=2, drop_last=False)
    helped = stream(Count(50), 4, rank=1, world_size=2, drop_last=False, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert [batch.tolist() for batch in helped] == [batch.tolist() for batch in alone]
    for batch in helped:
        assert batch.tolist() == [1, 3, 5, 7]
        break
    assert helped.cursor == Cursor(0, 2, 8)
    assert flat(helped) == list(range(9, 50, 2))


def test_a_stream_that_can_seek_is_asked_to_and_told_the_epoch() -> None:
    ours = stream(Seeking(10), 2)
    next(iter(ours))
    data = Seeking(10)
    other = stream(data, 2)
    other.load_state_dict(ours.state_dict())
    assert flat(other) == list(range(2, 10))
    assert flat(other) == list(range(1000, 1010))
    assert data.begun_at == [2, 0]


def test_a_stream_has_the_length_it_says() -> None:
    with pytest.raises(TypeError, match="Count is a stream without a length"):
        len(stream(Count(3), 1))


def test_an_empty_stream_does_not_turn_for_ever() -> None:
    with pytest.raises(UsageError, match="had no batch for this rank"):
        next(stream(Count(3), 4).endless())
    dries_up = Count(4)
    batches = stream(dries_up, 4).endless()
    next(batches)
    dries_up.length = 0
    with pytest.raises(UsageError, match="epoch 1 had no batch for this rank"):
        next(batches)
