"""Placements: every rank keeps a part of optimizer state, and the numbers are those of plain DDP."""

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.pool import Pool

SHARDED = ("zero1", "zero2", "zero3")
TRANSPORTS = ("shm", "torch")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.003, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 3))


def train(
    rank: int, size: int, placement: str, transport: str, optimizer: str, steps: int, dtype: Any = torch.float32
) -> dict[str, Any]:
    """The weights after some steps, the whole state of the optimizer, and how much state this rank holds."""
    model = paceline.DistributedDataParallel(net().to(dtype), placement=placement, transport=transport, timeout=20)
    cls, options = OPTIMIZERS[optimizer]
    master = torch.float32 if dtype is not torch.float32 else None
    opt = model.optimizer(cls, master=master, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(8, 40, generator=generator).to(dtype)
        model(inputs).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    held = sum(v.numel() for state in opt.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    with model.whole():
        told: dict[str, Any] = plain({"weights": list(model.module.parameters()), "state": opt.state_dict()})
    return {**told, "held": held}


def plain(value: Any) -> Any:
    """The same with lists in the place of tensors: what can be sent and compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().double().tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", SHARDED)
def test_two_ranks_have_the_bits_of_ddp(procs: Pool, transport: str, optimizer: str, placement: str) -> None:
    expected = procs(2).run(train, "ddp", transport, optimizer, 50)
    found = procs(2).run(train, placement, transport, optimizer, 50)
    for rank in range(2):
        assert found[rank]["weights"] == expected[0]["weights"]
        assert found[rank]["state"] == expected[0]["state"]
    if optimizer == "adamw":
        assert max(rank["held"] for rank in found) < 0.52 * expected[0]["held"]


def test_three_ranks_over_shared_memory_have_the_bits_of_ddp(procs: Pool) -> None:
    expected = procs(3).run(train, "ddp", "shm", "adamw", 20)
    found = procs(3).run(train, "zero1", "shm", "adamw", 20)
    assert all(one["weights"] == expected[0]["weights"] for one in found)
    assert all(one["state"] == expected[0]["state"] for one in found)


@pytest.mark.parametrize("placement", ["ddp", *SHARDED])
def test_master_weights(procs: Pool, placement: str) -> None:
    """Updates that bfloat16 would round away are kept."""
    expected = procs(2).run(train, "ddp", "shm", "adamw", 20, torch.bfloat16)
    found = procs(2).run(train, placement, "shm", "adamw", 20, torch.bfloat16)
    assert all(one["weights"] == expected[0]["weights"] for one in found)
    assert all(one["state"] == expected[0]["state"] for one in found)
    for (kind, weight), state in zip(found[0]["weights"], found[0]["state"]["state"].values(), strict=True):
        assert (kind, state["master"][0]) == ("torch.bfloat16", "torch.float32")
        assert torch.tensor(state["master"][1]).bfloat16().tolist() == weight
