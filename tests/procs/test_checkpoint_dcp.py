"""Snapshots as checkpoints of torch.distributed.checkpoint, and back."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import paceline
from paceline.checkpoint import Checkpointer, CheckpointMismatch, Damaged, digest, export_dcp, import_dcp
from paceline.errors import UsageError
from tests.pool import Pool


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 8), nn.BatchNorm1d(8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(rank: int, size: int, directory: str, placement: str) -> str:
    model = paceline.DistributedDataParallel(net(), placement=placement, timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    train(model, optimizer)
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        checkpointer.save(7, model=model, optimizer=optimizer)
    return digest(model, optimizer, 0)


def load(rank: int, size: int, directory: str, placement: str) -> str:
    model = paceline.DistributedDataParallel(net(1), placement=placement, timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    assert Checkpointer(directory).load(model=model, optimizer=optimizer).step == 9
    return digest(model, optimizer, 0)


def load_with_fsdp(rank: int, size: int, directory: str) -> list[Any]:
    """FSDP2 takes it over, its optimizer too. Returns the parameters and moments as a whole."""
    model = net(1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    params: list[Any] = list(model.parameters())
    moments = [optimizer.state[param]["exp_avg"] for param in params]
    return [one.full_tensor().tolist() for one in (*params, *moments)]


@pytest.fixture
def saved(procs: Pool, tmp_path: Path) -> tuple[Path, str]:
    """A snapshot of two ranks under zero1, and its digest."""
    return tmp_path / "run" / "step-00000007", procs(2).run(save, str(tmp_path / "run"), "zero1")[0]


def test_fsdp_goes_on_from_a_snapshot(procs: Pool, tmp_path: Path, saved: tuple[Path, str]) -> None:
    export_dcp(saved[0], tmp_path / "dcp")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Checkpointer(tmp_path / "run").load(model=model, optimizer=optimizer)
    expected = [*model.parameters(), *(optimizer.state[param]["exp_avg"] for param in model.parameters())]
    for told in procs(2).run(load_with_fsdp, str(tmp_path / "dcp")):
        assert told == [one.tolist() for one in expected]


def test_what_was_exported_comes_back(procs: Pool, tmp_path: Path, saved: tuple[Path, str]) -> None:
    export_dcp(saved[0], tmp_path / "dcp")
    made = import_dcp(tmp_path / "dcp", tmp_path / "back", step=9, trust_pickle=True)
    assert (made.step, made.path) == (9, tmp_path / "back" / "step-00000009")
    for placement, ranks in (("zero3", 2), ("ddp", 3)):
        assert set(procs(ranks).run(load, str(tmp_path / "back"), placement)) == {saved[1]}
    model = net()
    swapped = torch.optim.AdamW(reversed(list(model.parameters())))
    with pytest.raises(CheckpointMismatch):
        Checkpointer(tmp_path / "back").load(model=model, optimizer=swapped)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_no_pickle_is_opened_without_a_word(
    tmp_path: Path, saved: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export_dcp(saved[0], "dcp")
    Path("dcp/.metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UsageError, match="trust_pickle=True"):
        import_dcp("dcp", "back", step=1)
    assert not Path("exploded").exists() and not Path("back").exists()


def test_weights_go_as_safetensors_without_pickle(tmp_path: Path, saved: tuple[Path, str]) -> None:
    export_dcp(saved[0], tmp_path / "hf", safetensors=True)
    assert not (tmp_path / "hf" / ".metadata").exists()
    model, again = net(1), net(2)
    Checkpointer(tmp_path / "run").load(model=model)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    again.load_state_dict(found)
    assert digest(again, None, 0) == digest(model, None, 0)
    import_dcp(tmp_path / "hf", tmp_path / "back", step=1)
    again = net(3)
    Checkpointer(tmp_path / "back").load(model=again)
    assert digest(again, None, 0) == digest(model, None, 0)


def test_what_cannot_be_exported_or_imported(tmp_path: Path, saved: tuple[Path, str]) -> None:
    with pytest.raises(UsageError, match="neither .metadata nor safetensors"):
        import_dcp(tmp_path, tmp_path / "back", step=1)
    export_dcp(saved[0], tmp_path / "dcp")
    with pytest.raises(UsageError, match="no tensors under 'net': expected one of 'model', 'optimizer'"):
        import_dcp(tmp_path / "dcp", tmp_path / "back", step=1, model="net", trust_pickle=True)
    (saved[0] / "state-00001.safetensors").unlink()
    with pytest.raises(Damaged, match="state-00001.safetensors cannot be read"):
        export_dcp(saved[0], tmp_path / "again")
    with Checkpointer(tmp_path / "alone", asynchronous=False) as checkpointer:
        model = net()
        checkpointer.save(1, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    with pytest.raises(UsageError, match="does not record which parameters"):
        export_dcp(tmp_path / "alone" / "step-00000001", tmp_path / "none")
    shutil.rmtree(tmp_path / "alone")
