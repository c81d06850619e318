"""Loaders of several ranks: the classic mistakes are named, and a sample log of all of them says exactly once."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives.checked import barrier
from paceline.data import Cursor, DataDiffers, DistributedSampler, Loader, check_first_batch, read_sample_log
from tests.pool import Pool
from tests.unit.test_data_stream import Count
from tests.unit.test_sampler import Numbers


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


def train(rank: int, size: int, folder: str, state: dict[str, Any] | None, steps: int) -> tuple[list[int], Any]:
    loader: Loader[torch.Tensor] = Loader(Numbers(50), 3, drop_last=False, sample_log=folder)
    if state:
        loader.load_state_dict(state)
    seen: list[int] = []
    for number, batch in enumerate(loader, start=1):
        seen += batch.tolist()
        loader.commit()
        if number == steps:
            break
    barrier()
    return seen, loader.state_dict()


def test_an_epoch_on_two_ranks_goes_on_on_three(procs: Pool, tmp_path: Path) -> None:
    first = procs(2).run(train, str(tmp_path), None, 4)
    # Another life does steps that nobody will build on: it is resumed from the same state.
    procs(2).run(train, str(tmp_path), first[0][1], 2)
    second = procs(3).run(train, str(tmp_path), first[0][1], 100)
    seen = [index for part, _ in [*first, *second] for index in part]
    assert sorted(seen) == list(range(50))
    assert [state for _, state in first] == [first[0][1]] * 2
    reading = read_sample_log(tmp_path)
    assert [(session.cursor, session.world_size) for session in reading.sessions] == [
        (Cursor(0, 0, 0), 2),
        (Cursor(0, 0, 24), 2),
        (Cursor(0, 0, 24), 3),
    ]
    assert reading.problems() == []
    assert reading.counts(0) == dict.fromkeys(range(50), 1)
    assert len(reading.undone) == 4


def differ(rank: int, size: int, which: str) -> str:
    settings: dict[str, dict[str, Any]] = {
        "length": {"dataset": Numbers(40 + rank)},
        "batch_size": {"batch_size": 2 + rank},
        "seed": {"seed": rank},
        "drop_last": {"drop_last": rank == 0},
        "rank": {"rank": 0, "world_size": size},
        "lanes": {"lanes": 4 + rank},
    }
    loader: Loader[torch.Tensor] = Loader(**{"dataset": Numbers(40), "batch_size": 2, **settings[which]})
    with pytest.raises(DataDiffers) as caught:
        next(iter(loader))
    barrier()  # the group is still usable
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (
            "length",
            "different lengths on different ranks, so samples would be lost or repeated (rank 0: 40; ",
        ),
        ("batch_size", "(rank 0: 2; rank 1: 3)"),
        ("seed", "ranks have different seeds"),
        ("drop_last", "different values of drop_last"),
        ("rank", "ranks 0 and 1 would all load the samples of rank 0"),
        ("lanes", "different values of lanes"),
    ],
)
def test_ranks_that_would_load_differently_are_told_so(procs: Pool, which: str, message: str) -> None:
    for told in procs(2).run(differ, which):
        assert message in told


class Constant(Numbers):
    def __getitem__(self, index: int) -> int:
        return 7


def heard(rank: int, size: int, constant: bool, streamed: bool = False) -> list[str]:
    data: Any = Count(12) if streamed else Constant(12) if constant else Numbers(12)
    loader: Loader[torch.Tensor] = Loader(data, 2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            list(loader)
        check_first_batch({"x": [torch.zeros(2, dtype=torch.bfloat16), "text"]} if constant else rank)
        check_first_batch(object())
    return [str(one.message) for one in found]


def test_equal_first_batches_are_warned_of_once_and_on_one_rank(procs: Pool) -> None:
    first, *others = procs(3).run(heard, True)
    assert len(first) == 2  # the Loader's, and that of the call by hand
    for told in first:
        assert "ranks 0, 1 and 2 got the same first batch" in told
    assert others == [[], []]


def test_batches_that_differ_are_not_warned_of(procs: Pool) -> None:
    assert procs(2).run(heard, False) == [[], []]
    assert procs(2).run(heard, False, True) == [[], []]


def only_one_rank(rank: int, size: int) -> list[int]:
    found: list[int] = []
    if rank == 0:  # an evaluation on one rank: it says so, and nobody is waited for
        found = flat(Loader(Numbers(6), 2, shuffle=False, rank=0, world_size=1))
    barrier()
    return found


def test_a_rank_can_load_by_itself(procs: Pool) -> None:
    assert procs(2).run(only_one_rank) == [[0, 1, 2, 3, 4, 5], []]


def nothing_for_some(rank: int, size: int) -> list[int]:
    assert dist.get_world_size() == size
    loader: Loader[torch.Tensor] = Loader(Numbers(7), 2, shuffle=False, drop_last=False)
    list(loader)
    return flat(loader)


def test_a_tail_too_short_for_all_ranks_hangs_nobody(procs: Pool) -> None:
    assert procs(3).run(nothing_for_some) == [[0, 1, 6], [2, 3], [4, 5]]


def outlive_a_rank(rank: int, size: int, folder: str) -> list[int]:
    """Three ranks, of which the last is gone after a step that was committed and one that was not. Returns what this
    rank has committed."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/0", size), rank=rank, world_size=size)
    loader: Loader[torch.Tensor] = Loader(Numbers(40), 2, manual_commit=True, sample_log=f"{folder}/log")
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(40), exactly_once=True)
    batches = loader.endless()
    seen = next(batches).tolist()
    loader.commit()
    sampler.commit(2)
    next(batches)
    barrier()
    dist.destroy_process_group()
    if rank == 2:
        return seen
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/1", 2), rank=rank, world_size=2)
    loader.follow_group()
    sampler.follow_group()
    assert (len(sampler), sampler.num_replicas) == (17, 2)
    for _ in range(8):
        seen += next(batches).tolist()
        loader.commit()
    barrier()
    dist.destroy_process_group()
    return seen


def test_what_a_rank_that_is_gone_had_not_committed_comes_again(procs: Pool, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    parts = procs(3).run(outlive_a_rank, str(tmp_path), group=False)
    seen = [index for part in parts for index in part]
    assert len(seen) == len(set(seen)) == 6 + 8 * 4  # of 40, the last 2 fill no batch of the first world
    reading = read_sample_log(tmp_path / "log")
    assert [session.world_size for session in reading.sessions] == [3, 2]
    assert reading.problems() == []
