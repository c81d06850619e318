"""Every placement and number of ranks loads what every other has saved."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import paceline
from paceline.checkpoint import Checkpointer, CheckpointMismatch, digest, export_weights
from tests.pool import Pool


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 3))


def move(rank: int, size: int, source: str, target: str, placement: str, steps: int) -> tuple[str, str]:
    """Load under a placement, train on, and save. Returns the digests after loading and before saving.

    A source may also be one plain file of weights."""
    model = paceline.DistributedDataParallel(net(), placement=placement, timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    if source.endswith(".safetensors"):
        model.module.load_state_dict(safetensors.torch.load_file(source))
    elif source:
        Checkpointer(source).load(model=model, optimizer=optimizer)
    loaded = digest(model, optimizer, 0)
    for _ in range(steps):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpointer(target, asynchronous=False) as checkpointer:
        assert checkpointer.save(1, model=model, optimizer=optimizer).problem is None
    if placement in ("zero1", "zero3"):
        export_weights(model, Path(target) / f"weights-{rank}.safetensors")
    return loaded, digest(model, optimizer, 0)


def load_another_optimizer(rank: int, size: int, source: str) -> tuple[str, bool]:
    model = paceline.DistributedDataParallel(net(), placement="zero1", timeout=20)
    groups: Any = list(reversed(list(model.parameters())))
    optimizer = model.optimizer(torch.optim.AdamW, groups, lr=1e-2)
    before = digest(model, None, 0)
    try:
        Checkpointer(source).load(model=model, optimizer=optimizer)
    except CheckpointMismatch as error:
        return str(error), digest(model, None, 0) == before
    return "loaded", False


def test_a_checkpoint_goes_from_placement_to_placement(procs: Pool, tmp_path: Path) -> None:
    path, saved = "", ""
    for number, (placement, ranks) in enumerate([("ddp", 4), ("zero3", 2), ("zero1", 3), ("zero2", 2), ("ddp", 2)]):
        target = str(tmp_path / str(number))
        told = procs(ranks).run(move, path, target, placement, 2)
        assert len(set(told)) == 1
        assert told[0][0] == saved or not saved, f"loaded under {placement} on {ranks} ranks"
        path, saved = target, told[0][1]
    alone = net()
    optimizer = torch.optim.AdamW(alone.parameters())
    Checkpointer(path).load(model=alone, optimizer=optimizer)
    assert digest(alone, optimizer, 0) == saved

    plain, weights = net(), net()
    for folder in (tmp_path / "1", tmp_path / "2"):  # of zero3, and of zero1
        Checkpointer(folder).load(model=plain)
        for exported in sorted(folder.glob("weights-*.safetensors")):
            weights.load_state_dict(safetensors.torch.load_file(exported))
            assert digest(weights, None, 0) == digest(plain, None, 0)

    # And back: the one plain file begins a run of every kind.
    file = str(tmp_path / "2" / "weights-1.safetensors")
    for placement, ranks in (("ddp", 4), ("zero3", 2), ("zero1", 3)):
        target = str(tmp_path / f"again-{placement}")
        told = procs(ranks).run(move, file, target, placement, 0)
        assert len(set(told)) == 1
        begun = net()
        Checkpointer(target).load(model=begun)
        assert digest(begun, None, 0) == digest(weights, None, 0)

    for text, untouched in procs(2).run(load_another_optimizer, path):
        assert untouched and "of the optimizer's parameter 0 has shape (300, 40), expected (3,)" in text
