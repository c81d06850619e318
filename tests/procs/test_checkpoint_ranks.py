"""Checkpoints of several ranks: one mind about what was saved, what is loaded, and when to stop."""

import os
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
    CheckpointEvent,
    CheckpointMismatch,
    NoCheckpoint,
    PerRank,
    Preemption,
    digest,
    rng_state,
    set_rng_state,
    state,
)
from paceline.collectives import TorchDistTransport, finish
from paceline.errors import CollectiveMismatch, PeerAbsent, ReplicaDrift, UsageError
from paceline.stored.directory import LOCK
from tests.pool import Pool

WRAPPERS: dict[str, Any] = {
    "ours": paceline.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "bare": lambda module: module,
}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != LOCK)


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
    assert names(tmp_path) == ["step-00000002"], "probes are gone"
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
    events: list[CheckpointEvent] = []
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
    assert "step-00000030 (rank 0): rank 2 has no intact copy of it" in skipped
    assert any(text.startswith("step-00000020 (rank 1): state.safetensors has") for text in skipped)
    assert any(text.startswith("step-00000020 (rank 2): rank 0 has no intact copy") for text in skipped)

    for path in ("a/step-00000010/manifest.json", "b/step-00000010/manifest-00002.json"):
        (tmp_path / path).unlink()
    told = [text.partition(" that is intact") for text in procs(3).run(load_newest, directories)]
    assert told[0][2] == told[1][2] == told[2][2]
    assert "no checkpoint" in told[0][0] and "manifest.json cannot be read" in told[0][2]


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
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000004"]


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
    """Rank 1 continues with its next backward, then with something that no other rank can see."""
    checkpointer, told = Checkpointer(directory, timeout=60), []
    group, bucket = dist.group.WORLD, torch.ones(3)
    assert group is not None
    transport = TorchDistTransport(group)

    def reduce_bucket() -> None:
        finish(transport.all_reduce(bucket), what="bucket 0 of backward 2", watch=transport.watch, timeout_s=60)

    with pytest.raises(CollectiveMismatch) as wrong:
        checkpointer.save(1, note=1) if rank == 0 else reduce_bucket()
    told.append(str(wrong.value))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("raised", "")
    if rank == 0:
        store.wait(["raised"])
        reduce_bucket()  # the one that rank 1 has left behind
        with pytest.raises(PeerAbsent) as late:
            Checkpointer(directory, timeout=0.1).save(1, note=1)
        told.append(f"{late.value.ranks} {late.value}")
    dist.barrier()
    checkpointer.save(2, note=2)
    checkpointer.wait()
    return told


def test_ranks_that_do_not_save_are_named_soon(procs: Pool, tmp_path: Path) -> None:
    (elsewhere, late), (same,) = procs(2).run(save_on_one_rank, str(tmp_path))
    assert elsewhere == same
    assert "rank 0 waits in the start of Checkpointer.save(1) at procs/test_checkpoint_ranks.py:" in elsewhere
    assert "rank 1 waits in bucket 0 of backward 2 at procs/test_checkpoint_ranks.py:" in elsewhere
    assert late.startswith("(1,) waited ") and "in the start of Checkpointer.save(1) for rank 1" in late
    assert names(tmp_path) == ["step-00000002"]


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


def save_where_another_run_does(rank: int, size: int, directory: str) -> tuple[str, int]:
    checkpointer = Checkpointer(directory, asynchronous=False)
    with pytest.raises(UsageError) as refused:
        checkpointer.save(7, note={"step": 7})
    return str(refused.value), checkpointer.load().step


def test_a_second_run_may_load_but_not_save(procs: Pool, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=False) as owner:
        owner.save(3, note={"step": 3})
        Checkpointer(tmp_path, asynchronous=False).save(5, note={"step": 5})  # the same process, so the same owner
        first, second = procs(2).run(save_where_another_run_does, str(tmp_path))
        assert first == second
        assert f"rank 0 cannot save to {tmp_path}: process {os.getpid()} on " in first[0] and first[1] == 5
        assert names(tmp_path) == ["step-00000003", "step-00000005"]
    procs(2).run(save_some, [str(tmp_path)] * 2, [9])
    assert load_newest(0, 1, [str(tmp_path)]) == (9, [])


def save_and_note_fsyncs(rank: int, size: int, directory: str) -> set[str]:
    """The directories that were synced. Which descriptor is which is asked at the moment of the call."""
    synced: set[str] = set()
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note)
        with Checkpointer(directory, asynchronous=False) as checkpointer:
            checkpointer.save(1, note=1)
    return synced


def test_every_new_directory_is_synced_and_so_is_its_parent(procs: Pool, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "1" / "checkpoints"
    synced = procs(2).run(save_and_note_fsyncs, str(directory))
    made = [tmp_path / "runs", tmp_path / "runs" / "1", directory]
    assert set().union(*synced) >= {str(path) for path in (tmp_path, *made)}
    assert [path.name for path in directory.iterdir() if path.name != LOCK] == ["step-00000001"]
    assert any(".new-" in path for path in synced[0]), "the snapshot itself, before it has its name"


def flip(tensor: torch.Tensor, element: int = 0) -> None:
    tensor.detach().view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(1 << 3)


def save_what_differs(rank: int, size: int, directory: str, what: str) -> tuple[str, tuple[int, ...]]:
    """Whether, and with which error, ranks save after the last one has changed something of its own."""
    model, optimizer = model_and_optimizer("ours")
    train(model, optimizer, 2)
    odd = rank == size - 1
    if what == "parameter" and odd:
        flip(model.get_parameter("module.2.weight"), 5)
    if what == "moment" and odd:
        flip(optimizer.state[model.get_parameter("module.0.bias")]["exp_avg_sq"])
    if what == "sharded":
        optimizer.state.pop(model.get_parameter("module.0.bias" if odd else "module.2.bias"))
    if what == "buffer":
        model.get_submodule("module").register_buffer("mean", torch.full((2,), float(rank)))
    try:
        with Checkpointer(directory, asynchronous=False, compare=what != "anything") as checkpointer:
            return str(checkpointer.save(2, model=model, optimizer=optimizer, rank=rank).problem), ()
    except ReplicaDrift as error:
        return f"{error.tensor}: {error}", error.ranks


@pytest.mark.parametrize(("what", "tensor"), [("parameter", "2.weight"), ("moment", "optimizer/state/1/exp_avg_sq")])
def test_what_has_drifted_is_not_saved(procs: Pool, tmp_path: Path, what: str, tensor: str) -> None:
    results = procs(3).run(save_what_differs, str(tmp_path), what)
    assert results[0] == results[1] == results[2]
    text, ranks = results[0]
    assert text.startswith(f"{tensor}: step 2 is not saved: replicas have drifted apart at step 2: rank 2 differs")
    assert ranks == (2,) and names(tmp_path) == []


@pytest.mark.parametrize(("what", "compared"), [("sharded", 2), ("buffer", 2), ("anything", 0)])
def test_what_may_differ_is_not_compared(procs: Pool, tmp_path: Path, what: str, compared: int) -> None:
    assert procs(2).run(save_what_differs, str(tmp_path), what) == [("None", ())] * 2
    found = Checkpointer(tmp_path).latest()
    assert found is not None and found.manifest.compared == compared


def change_the_copy(rank: int, size: int, directory: str) -> list[str]:
    """A bit of the writer's copy flips after the ranks have compared it, and before it is hashed."""
    model, optimizer = model_and_optimizer("ours")
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        good = str(checkpointer.save(1, model=model, optimizer=optimizer).problem)
        real = state.HostCopy.parts

        def parts(self: state.HostCopy) -> list[bytes | memoryview]:
            if "2.weight" in (taken := self.taken()):
                flip(taken["2.weight"])
            return real(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state.HostCopy, "parts", parts)
            bad = str(checkpointer.save(2, model=model, optimizer=optimizer).problem)
    return [good, bad]


def test_a_copy_that_changes_on_its_way_to_disk_is_not_saved(procs: Pool, tmp_path: Path) -> None:
    for good, bad in procs(2).run(change_the_copy, str(tmp_path)):
        assert good == "None"
        assert "the copy of 2.weight in host memory does not match what the ranks compared" in bad
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_may_go_on_from_what_was_compared(tmp_path: Path) -> None:
    """Also where another version, which compared nothing, has saved since."""
    for step, compare in ((1, False), (2, True), (3, False)):
        with Checkpointer(tmp_path, keep=3, asynchronous=False, compare=compare) as checkpointer:
            checkpointer.save(step, note=step)
    reader = Checkpointer(tmp_path)
    assert (reader.load("compared").step, reader.load().step, reader.load(3).step) == (2, 3, 3)
    shutil.rmtree(tmp_path / "step-00000002")
    assert reader.load("compared").step == 3
