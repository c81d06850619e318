"""Every rank writes and reads what it owns: with one directory and with several, and with files that are damaged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import Checkpointer, CheckpointMismatch, NoCheckpoint, digest, manifest
from paceline.checkpoint.snapshots import read
from paceline.replica.owned import OwnedBlocks
from paceline.replica.unit import Unit
from tests.pool import Pool

KINDS = ("plain", "conv", "half")


def build(placement: str, kind: str = "plain", seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A replica and its optimizer; "conv" has weights in another order of memory, "half" has master weights."""
    torch.manual_seed(seed)
    net: nn.Module = nn.Sequential(nn.Linear(48, 400), nn.ReLU(), nn.Linear(400, 300), nn.LayerNorm(300))
    if kind == "conv":
        net = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Conv2d(64, 32, 3))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    model = paceline.DistributedDataParallel(net.to(dtype), placement=placement, timeout=20)
    master = torch.float32 if kind == "half" else None
    return model, model.optimizer(torch.optim.AdamW, lr=1e-2, master=master)


def train(model: Any, optimizer: torch.optim.Optimizer, kind: str, steps: int) -> None:
    x = torch.randn(2, 16, 9, 9) if kind == "conv" else torch.randn(8, 48)
    for _ in range(steps):
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(rank: int, size: int, directories: list[str], placement: str, kind: str, steps: list[int]) -> str:
    model, optimizer = build(placement, kind)
    with Checkpointer(directories[rank], keep=9) as checkpointer:
        for step in steps:
            train(model, optimizer, kind, 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OwnedBlocks, "whole", nobody_gathers)
                patch.setattr(Unit, "gather", nobody_gathers)
                checkpointer.save(step, model=model, optimizer=optimizer, note=step)
        checkpointer.wait()
    return digest(model, optimizer, 0)


def nobody_gathers(*_: Any) -> None:
    raise AssertionError("a rank gathers the whole")


def load(rank: int, size: int, directories: list[str], placement: str, kind: str) -> tuple[str, str, bool]:
    """The digest of what was loaded, or the error, and whether a failure has left everything as it was."""
    model, optimizer = build(placement, kind, seed=1)
    train(model, optimizer, kind, 1)
    before = digest(model, optimizer, 0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OwnedBlocks, "whole", nobody_gathers)
            patch.setattr(Unit, "gather", nobody_gathers)
            loaded = Checkpointer(directories[rank]).load(model=model, optimizer=optimizer)
    except (NoCheckpoint, CheckpointMismatch) as error:
        return "", f"{type(error).__name__}: {error}", digest(model, optimizer, 0) == before
    assert loaded.more["note"] == loaded.step
    train(model, optimizer, kind, 1)  # it trains on
    Checkpointer(directories[rank]).load(loaded.step, model=model, optimizer=optimizer)
    return digest(model, optimizer, 0), "", True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_no_rank_gathers_to_save_or_to_load(procs: Pool, tmp_path: Path, placement: str, kind: str) -> None:
    """Not even weights that are not in row-major order, or masters."""
    directory = str(tmp_path)
    saved = procs(3).run(save, [directory] * 3, placement, kind, [1])
    assert len(set(saved)) == 1
    for into, ranks in ((placement, 3), ("ddp", 2), ("zero3", 2)):
        told = procs(ranks).run(load, [directory] * ranks, into, kind)
        assert {one for one, _, _ in told} == {saved[0]}, (into, told)


def test_ranks_that_share_no_directory_keep_their_own_shards(procs: Pool, tmp_path: Path) -> None:
    """Two hosts with two ranks each. A world that needs what another host has is told, and goes on with its files."""
    directories = [str(tmp_path / name) for name in "aabb"]
    saved = procs(4).run(save, directories, "zero3", "plain", [1, 2])[0]
    whole = {one for one, _, _ in procs(4).run(load, directories, "zero3", "plain")}
    assert whole == {saved}

    told = procs(2).run(load, directories[:2], "zero3", "plain")
    for _, text, untouched in told:
        assert untouched
        assert "NoCheckpoint: there is no checkpoint" in text and "copy all files of that directory's" in text
        assert "the directory has the files of rank 0, 1 of 4" in text, text
    assert told[0] == told[1]

    for step in ("step-00000001", "step-00000002"):
        shutil.copytree(tmp_path / "b" / step, tmp_path / "a" / step, dirs_exist_ok=True)
    assert read(tmp_path / "a" / "step-00000002").manifest.ranks == (0, 1, 2, 3)
    for placement, ranks in (("zero3", 2), ("ddp", 3)):
        told = procs(ranks).run(load, [str(tmp_path / "a")] * ranks, placement, "plain")
        assert {one for one, _, _ in told} == {saved}


def test_replicated_state_is_whole_in_every_directory(procs: Pool, tmp_path: Path) -> None:
    directories = [str(tmp_path / name) for name in "aab"]
    saved = procs(3).run(save, directories, "ddp", "plain", [1])[0]
    for name in "ab":
        told = procs(2).run(load, [str(tmp_path / name)] * 2, "zero2", "plain")
        assert {one for one, _, _ in told} == {saved}


def damage(directory: Path, how: str) -> str:
    """Do something to a file of rank 1 of the newest snapshot. Returns what the error says of it."""
    newest = directory / "step-00000002"
    file = newest / "state-00001.safetensors"
    raw = file.read_bytes()
    if how == "missing":
        file.unlink()
        return "state-00001.safetensors cannot be read"
    if how == "foreign":  # the same name and size, of another step
        shutil.copy(directory / "step-00000001" / file.name, file)
    elif how == "of another rank":
        shutil.copy(newest / "state.safetensors", file)
        return "state-00001.safetensors has"
    elif how == "flipped":
        file.write_bytes(raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:])
    elif how == "header":
        file.write_bytes(raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
    elif how == "manifests":
        other = read(directory / "step-00000001").manifest
        (newest / "manifest-00001.json").write_bytes(manifest.to_bytes(other))
        return "there are manifests of different snapshots"
    return "changed: the SHA-256 is"


@pytest.mark.parametrize("how", ["missing", "foreign", "of another rank", "flipped", "header", "manifests"])
def test_what_is_not_there_or_not_what_was_written_is_refused_on_every_rank(
    procs: Pool, tmp_path: Path, how: str
) -> None:
    directory = tmp_path / "saved"
    procs(2).run(save, [str(directory)] * 2, "zero1", "plain", [1, 2])
    expected = damage(directory, how)
    shutil.move(directory / "step-00000001", tmp_path / "aside")
    for placement, ranks in (("zero1", 2), ("zero3", 2), ("ddp", 1)):
        for _, text, untouched in procs(ranks).run(load, [str(directory)] * ranks, placement, "plain"):
            assert untouched and text.startswith("NoCheckpoint: ") and expected in text, text
    shutil.move(tmp_path / "aside", directory / "step-00000001")
    told = procs(2).run(load, [str(directory)] * 2, "zero3", "plain")
    assert not told[0][1] and told[0] == told[1], "all ranks take the one before"


def load_into(rank: int, size: int, directory: str, what: str) -> tuple[str, bool]:
    """Load into an optimizer that is not the one that was saved."""
    model, optimizer = build("zero1")
    params: list[Any] = list(model.parameters())
    if what == "order":  # two biases of one shape
        params[1], params[3] = params[3], params[1]
        params = [*params[:4], params[5], params[4]]
        optimizer = model.optimizer(torch.optim.AdamW, params, lr=1e-2)
    elif what == "class":
        optimizer = model.optimizer(torch.optim.SGD, lr=1e-2, momentum=0.9)
    elif what == "groups":
        optimizer = model.optimizer(torch.optim.AdamW, [{"params": params[:1]}, {"params": params[1:]}], lr=1e-2)
    elif what == "one rank":
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters()) if rank == 1 else optimizer
    before = digest(model, None, 0)
    try:
        Checkpointer(directory).load(model=model, optimizer=optimizer)
    except CheckpointMismatch as error:
        return str(error), digest(model, None, 0) == before
    return "loaded", False


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("order", "of the optimizer's parameter 1 has shape (400,), expected (300,)"),
        ("class", "holds the state of AdamW, expected that of SGD"),
        ("groups", "has an optimizer with [6] parameters in its groups, expected [1, 5]"),
        ("one rank", "holds the state of AdamW, expected that of SGD"),
    ],
)
def test_an_optimizer_that_was_changed_is_an_error_on_every_rank(
    procs: Pool, tmp_path: Path, what: str, expected: str
) -> None:
    procs(2).run(save, [str(tmp_path)] * 2, "zero1", "plain", [1])
    for text, untouched in procs(2).run(load_into, str(tmp_path), what):
        assert expected in text and untouched


def test_parameters_of_one_shape_in_another_order_are_told_by_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        swapped = torch.optim.AdamW([*model[1].parameters(), *model[0].parameters()])
        with pytest.raises(CheckpointMismatch, match="parameter 0 is '0.weight', expected '1.weight'"):
            checkpointer.load(model=model, optimizer=swapped)
        checkpointer.load(optimizer=swapped)  # without the model nobody knows the names


def save_two_optimizers(rank: int, size: int, directory: str) -> bool:
    """As for a generator and a critic: the second goes in by a name of its own."""
    (model, optimizer), (other, second) = build("zero1"), build("zero3", seed=3)
    train(model, optimizer, "plain", 1)
    train(other, second, "plain", 1)
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        assert checkpointer.save(1, model=model, optimizer=optimizer, second=second).problem is None
        before = digest(other, second, 0)
        with other.whole():
            state = {name: value.clone() for name, value in other.module.state_dict().items()}
        train(other, second, "plain", 1)
        checkpointer.load(model=model, optimizer=optimizer, second=second)
        other.module.load_state_dict(state)
    return digest(other, second, 0) == before


def test_a_second_optimizer_is_saved_in_shards_too(procs: Pool, tmp_path: Path) -> None:
    assert procs(2).run(save_two_optimizers, str(tmp_path)) == [True, True]


def die_in_a_save(rank: int, size: int, directory: str) -> str:
    """Rank 1 cannot write where the others do."""
    model, optimizer = build("zero1")
    train(model, optimizer, "plain", 1)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, model=model, optimizer=optimizer)
    checkpointer.wait()
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.checkpoint.writer.write_file", full)
            checkpointer.save(2, model=model, optimizer=optimizer)
            checkpointer.close()
    else:
        checkpointer.save(2, model=model, optimizer=optimizer)
    problem = checkpointer.save(3, model=model, optimizer=optimizer).problem
    checkpointer.wait()
    dist.barrier()
    return str(problem)


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_part_that_cannot_be_written_is_told_on_all_ranks_and_training_goes_on(procs: Pool, tmp_path: Path) -> None:
    told = procs(3).run(die_in_a_save, str(tmp_path))
    assert told[0] == told[1] == told[2]
    assert "the checkpoint of step 2 could not be written" in told[0]
    assert "rank 1 could not write its part: OSError: [Errno 28] No space left on device" in told[0]
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000001", "step-00000003"]
