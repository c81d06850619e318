"""Checkpoints of state on a CUDA device: the copy is queued, and what is trained meanwhile is not in it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import Checkpointer, digest, export_weights


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))).to(device)
    return model, torch.optim.AdamW(model.parameters(), fused=device == "cuda")


def save_while_training(_rank: int, _size: int, folder: str) -> None:
    tmp_path = Path(folder)
    model, optimizer = make("cuda")
    train(model, optimizer, 3)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, model=model, optimizer=optimizer)  # the first one allocates pinned memory
    checkpointer.wait()
    train(model, optimizer, 1)
    expected = digest(model, optimizer, 4)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # the device is busy: the copy has to wait for it, the caller has not
    saved = checkpointer.save(4, model=model, optimizer=optimizer)
    pending = not torch.cuda.current_stream().query()
    train(model, optimizer, 5)
    checkpointer.wait()
    assert pending and saved.blocked_s < 0.1, saved
    for device in ("cuda", "cpu"):
        again, state = make(device)
        loaded = Checkpointer(tmp_path).load(model=again, optimizer=state if device == "cuda" else None)
        assert loaded.step == 4
        if device == "cuda":
            assert digest(again, state, 4) == expected
        assert all(tensor.device.type == device for tensor in again.state_dict().values())
    assert digest(again, None, 4) != digest(model, None, 4)
    assert export_weights(model, tmp_path / "weights.safetensors").stat().st_size > 24 * 512 * 512 * 4


def test_the_state_of_the_step_is_saved_while_training_goes_on(procs: Any, tmp_path: Path) -> None:
    procs(1).run(save_while_training, str(tmp_path), group=False)
