"""Checkpoints of several ranks: one mind about what was saved, what is loaded, and when to stop."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import (
    Checkpointer,
    CheckpointMismatch,
    Event,
    NoCheckpoint,
    PerRank,
    Preemption,
    arrive,
    digest,
    rng_state,
    set_rng_state,
)
from paceline.collectives import TorchDistTransport, finish
from paceline.errors import CollectiveMismatch, PeerAbsent
from tests.pool import Pool

WRAPPERS: dict[str, Any] = {
    "ours": paceline.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "bare": lambda module: module,
}


def model_and_optimizer(wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model: nn.Module = WRAPPERS[wrapper](module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()


def save_in_the_middle(rank: int, size: int, directory: str, wrapper: str) -> tuple[str, float]:
    model, optimizer = model_and_optimizer(wrapper)
    torch.manual_seed(100 + rank)
    train(model, optimizer, 2)
    checkpointer = Checkpointer(directory)
    saved = checkpointer.save(2, model=model, optimizer=optimizer, rng=PerRank(rng_state()), rank=PerRank(rank))
    train(model, optimizer, 2)
    checkpointer.wait()
    return digest(model, optimizer, 4), saved.blocked_s


def resume(rank: int, size: int, directory: str, wrapper: str) -> tuple[str, str, list[int]]:
    model, optimizer = model_and_optimizer(wrapper)
    train(model, optimizer, 1)
    loaded = Checkpointer(directory).load(model=model, optimizer=optimizer)
    at_load = digest(model, optimizer, loaded.step)
    if size == loaded.world_size:
        set_rng_state(loaded.more["rng"][rank])
        train(model, optimizer, 2)
    return at_load, digest(model, optimizer, 4), loaded.more["rank"]


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_a_resumed_world_ends_with_the_same_digest(procs: Pool, tmp_path: Path, wrapper: str) -> None:
    expected = {told for told, _ in procs(2).run(save_in_the_middle, str(tmp_path), wrapper)}
    assert len(expected) == 1
    resumed = procs(2).run(resume, str(tmp_path), wrapper)
    assert {told for _, told, _ in resumed} == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"], "probes are gone"
    # Any other world, in any other wrapper, or in none.
    alone = procs(1).run(resume, str(tmp_path), "bare", group=False)
    three = procs(3).run(resume, str(tmp_path), "ours")
    assert {told for told, _, _ in (*alone, *three, *resumed)} == {alone[0][0]}
    assert alone[0][2] == three[2][2] == [0, 1]


def save_some(rank: int, size: int, directories: list[str], steps: list[int]) -> list[str]:
    kinds: list[str] = []
    checkpointer = Checkpointer(directories[rank], keep=3, on_event=lambda event: kinds.append(event.kind))
    for step in steps:
        checkpointer.save(step, weight=torch.full((2,), float(step)), note={"step": step})
    checkpointer.wait()
    return kinds


def load_newest(rank: int, size: int, directories: list[str]) -> tuple[int, list[str]] | str:
    events: list[Event] = []
    checkpointer = Checkpointer(directories[rank], on_event=events.append)
    found = checkpointer.latest()
    try:
        loaded = checkpointer.load()
    except NoCheckpoint as error:
        assert found is None
        return str(error)
    assert found is not None and found.step == loaded.step == loaded.more["note"]["step"]
    assert len(events) == len(loaded.skipped), "each is told once"
    return loaded.step, [str(one) for one in loaded.skipped]


def test_ranks_that_do_not_share_a_directory_have_copies_and_agree(procs: Pool, tmp_path: Path) -> None:
    """F25: the newest that is good on all ranks, whatever each of them sees."""
    directories = [str(tmp_path / name) for name in "aab"]
    kinds = procs(3).run(save_some, directories, [10, 20, 30])
    assert [told.count("saved") for told in kinds] == [3, 0, 3], "the lowest rank of each directory writes"
    assert {step for step, _ in procs(3).run(load_newest, directories)} == {30}

    shutil.rmtree(tmp_path / "b" / "step-00000030")  # rank 2 has lost the newest
    file = tmp_path / "a" / "step-00000020" / "state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 4
    file.write_bytes(raw)  # and ranks 0 and 1 the one before
    results = procs(3).run(load_newest, directories)
    assert {step for step, _ in results} == {10}
    assert results[0] == results[1] == results[2]
    skipped = results[0][1]
    assert "step-00000030 (rank 0): rank 2 has no good copy of it" in skipped
    assert any(text.startswith("step-00000020 (rank 1): state.safetensors has") for text in skipped)
    assert any(text.startswith("step-00000020 (rank 2): rank 0 has no good copy") for text in skipped)

    for directory in "ab":
        (tmp_path / directory / "step-00000010" / "manifest.json").unlink()
    told = [text.partition(" that is whole") for text in procs(3).run(load_newest, directories)]
    assert told[0][2] == told[1][2] == told[2][2]
    assert "no checkpoint" in told[0][0] and "manifest.json cannot be opened" in told[0][2]


def save_where_it_fails(rank: int, size: int, directory: str) -> tuple[list[Any], str]:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, note=1)
    checkpointer.close()
    dist.barrier()
    if rank == 0:
        Path(directory).rename(f"{directory}-aside")
        Path(directory).write_text("in the way")
    dist.barrier()
    first = checkpointer.save(2, note=2).problem
    second = checkpointer.save(3, note=3).problem
    checkpointer.close()
    dist.barrier()
    if rank == 0:
        Path(directory).unlink()
        Path(f"{directory}-aside").rename(directory)
    dist.barrier()
    third = checkpointer.save(4, note=4).problem
    checkpointer.wait()
    steps = [None if problem is None else problem.step for problem in (first, second, third)]
    return steps, str(third)


def test_all_ranks_learn_that_a_save_has_failed_and_go_on(procs: Pool, tmp_path: Path) -> None:
    results = procs(2).run(save_where_it_fails, str(tmp_path / "checkpoints"))
    assert results[0] == results[1]
    steps, text = results[0]
    assert steps == [None, 2, 3]
    assert text.startswith("rank 0: the checkpoint of step 3 could not be written")
    kept = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000004"]


def save_different_things(rank: int, size: int, directory: str) -> tuple[str, str]:
    checkpointer = Checkpointer(directory)
    with pytest.raises(CollectiveMismatch) as steps:
        checkpointer.save(5 + rank, note=1)
    with pytest.raises(CollectiveMismatch) as models:
        checkpointer.save(5, model=nn.Linear(2, 2 + rank, bias=rank == 0))
    assert models.value.ranks == (1,)
    checkpointer.save(6, note=1)
    checkpointer.wait()
    return str(steps.value), str(models.value)


def load_into_different_models(rank: int, size: int, directory: str) -> tuple[str, bool]:
    model = nn.Linear(2, 2 + rank)
    before = digest(model, None, 0)
    try:
        Checkpointer(directory).load(model=model)
    except CheckpointMismatch as error:
        return str(error), digest(model, None, 0) == before
    return "loaded", False


def save_linear(rank: int, size: int, directory: str) -> None:
    torch.manual_seed(0)
    Checkpointer(directory, asynchronous=False).save(5, model=nn.Linear(2, 2))


def test_ranks_that_are_not_of_one_mind_are_told(procs: Pool, tmp_path: Path) -> None:
    for steps, models in procs(2).run(save_different_things, str(tmp_path / "saves")):
        assert "rank 0 called Checkpointer.save(5); rank 1 called Checkpointer.save(6)" in steps
        assert (
            "'weight': expected float32 of shape (2, 2) as on rank 0, got float32 of shape (3, 2) on rank 1" in models
        )
        assert "'bias': expected float32 of shape (2,) as on rank 0, got no such tensor on rank 1" in models
    procs(2).run(save_linear, str(tmp_path / "models"))
    results = procs(2).run(load_into_different_models, str(tmp_path / "models"))
    for told, untouched in results:
        assert "first difference is 'weight': expected float32 of shape (3, 2), got float32 of shape (2, 2)" in told
        assert untouched


def save_on_one_rank(rank: int, size: int, directory: str) -> list[str]:
    """Rank 1 goes on with its next backward, then with something that no other rank can see."""
    checkpointer, told = Checkpointer(directory, timeout=60), []
    group, bucket = dist.group.WORLD, torch.ones(3)
    assert group is not None
    transport = TorchDistTransport(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrive, "SLICE_S", 0.8)  # longer than the half second after which a wait can be seen
        patch.setattr(arrive, "STUCK_S", 0.5)
        if rank == 0:
            with pytest.raises(CollectiveMismatch) as wrong:
                checkpointer.save(1, note=1)
            told.append(f"{wrong.value.ranks} {wrong.value}")
        finish(transport.all_reduce(bucket), what="bucket 0 of backward 2", watch=transport.watch, timeout_s=20)
        if rank == 0:
            with pytest.raises(PeerAbsent, match=re.escape(f"s in {arrive.BARRIER} for rank 1")):
                paceline.barrier(timeout=0.1)
            with pytest.raises(PeerAbsent) as late:
                Checkpointer(directory, timeout=0.1).save(1, note=1)
            told.append(f"{late.value.ranks} {late.value}")
        dist.barrier()
        checkpointer.save(2, note=2)
        checkpointer.wait()
    return told


def test_ranks_that_do_not_save_are_named_soon(procs: Pool, tmp_path: Path) -> None:
    (elsewhere, late), _ = procs(2).run(save_on_one_rank, str(tmp_path))
    assert elsewhere.startswith("(1,) rank 0 called Checkpointer.save(1) and has waited ")
    assert "s, but rank 1 waits in bucket 0 of backward 2. All ranks must make the same call" in elsewhere
    assert late.startswith("(1,) ") and "s for rank 1, more than timeout=0.1 s" in late
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]


def save_by_seconds(rank: int, size: int, directory: str) -> list[int]:
    checkpointer = Checkpointer(directory, every_seconds=0.05)
    saved: list[int] = []
    step = 0
    while len(saved) < 3:
        step += 1
        if rank == 1 and step % 7 == 0:
            torch.randn(200, 200) @ torch.randn(200, 200)  # clocks and paces differ
        if checkpointer.due(step):
            saved.append(step)
            checkpointer.save(step, note=step)
    checkpointer.wait()
    return saved


def test_rank_0s_clock_decides_for_all(procs: Pool, tmp_path: Path) -> None:
    first, second = procs(2).run(save_by_seconds, str(tmp_path))
    assert first == second


def stop_when_asked(rank: int, size: int, directory: str, within: float) -> tuple[int, list[int]]:
    """Rank 1 gets SIGTERM in step 5 and again while the ranks save."""
    checkpointer, step = Checkpointer(directory), 0
    with Preemption(within=within) as preemption:
        while not preemption.agreed():
            step += 1
            if rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save(step, note={"step": step})
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.wait()
        return step, preemption.signals


@pytest.mark.parametrize("within", [0.0, 0.05])
def test_a_signal_to_one_rank_stops_all_in_the_same_step(procs: Pool, tmp_path: Path, within: float) -> None:
    """F18 and F19."""
    (step, none), (same, signals) = procs(2).run(stop_when_asked, str(tmp_path), within)
    assert step == same >= 5
    assert step == 5 or within, "they talk in every step"
    assert (none, signals) == ([], [signal.SIGTERM] * 2)
    assert load_newest(0, 1, [str(tmp_path)]) == (step, [])
