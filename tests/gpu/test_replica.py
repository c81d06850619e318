"""The wrapper on a GPU, over NCCL: the same numbers as torch's class."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.errors import UnusedParameters
from tests.gpu.ranks import Check, on_nccl

BOTH = "cpu:gloo,cuda:nccl"
Nccl = Callable[..., None]


@pytest.fixture
def nccl(procs: Any, tmp_path: Path) -> Nccl:
    """`nccl(check, size, *args)` runs `check(rank, size, *args)` on NCCL ranks that share the GPU."""

    def run(check: Check, size: int, *args: Any, backend: str = BOTH) -> None:
        procs(size).run(on_nccl, str(tmp_path / "store"), backend, check, *args, group=False, deadline_s=120)

    return run


class Branches(nn.Module):
    """A module with a branch that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(32, 32)
        self.sometimes = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        z: torch.Tensor = self.sometimes(y) if branch else y
        return z


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).cuda()


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(16, 64, generator=generator).cuda() for _ in range(count)]


def train(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in inputs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), float((a - b).abs().max())


def parity(rank: int, size: int, options: dict[str, Any]) -> None:
    net = network()
    inputs = batches(rank, 20)
    ours = train(paceline.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.1, **options), inputs)
    theirs = train(TorchDDP(copy.deepcopy(net), bucket_cap_mb=0.1, **options), inputs)
    assert_equal(ours, theirs)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", [BOTH, "nccl"])
def test_two_ranks_train_to_the_same_bits_as_torch(nccl: Nccl, backend: str) -> None:
    nccl(parity, 2, {}, backend=backend)


@pytest.mark.timeout(180)
def test_device_ids_are_taken(nccl: Nccl) -> None:
    nccl(parity, 2, {"device_ids": [0]})


def hooks(rank: int, size: int) -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        net = network()
        inputs = batches(rank, 5)
        results = []
        for wrapper in (paceline.DistributedDataParallel, TorchDDP):
            model = wrapper(copy.deepcopy(net))
            model.register_comm_hook(None, hook)
            results.append(train(model, inputs))
        assert_equal(*results)


@pytest.mark.timeout(180)
def test_torch_hooks_give_the_same_bits(nccl: Nccl) -> None:
    nccl(hooks, 2)


def unused(rank: int, size: int) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)).cuda()
    model = paceline.DistributedDataParallel(Branches().cuda(), bucket_cap_mb=0.001)
    model(x, rank == 0).sum().backward()
    grads = {name: p.grad for name, p in model.module.named_parameters()}
    assert grads["never.weight"] is None
    mine = grads["sometimes.weight"]
    assert mine is not None
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(mine, of_rank_0)

    strict = paceline.DistributedDataParallel(Branches().cuda(), unused="error")
    with pytest.raises(UnusedParameters, match="sometimes.weight: unused on rank 1 only"):
        strict(x, rank == 0).sum().backward()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", [BOTH, "nccl"])
def test_unused_parameters(nccl: Nccl, backend: str) -> None:
    nccl(unused, 2, backend=backend)


def accumulation(rank: int, size: int) -> None:
    net = network()
    every = [batches(r, 4) for r in range(size)]
    model = paceline.DistributedDataParallel(copy.deepcopy(net))
    with model.no_sync():
        for x in every[rank][:-1]:
            (model(x).square().mean() / 4).backward()
    (model(every[rank][-1]).square().mean() / 4).backward()
    for x in [x for mine in every for x in mine]:
        (net(x).square().mean() / (4 * size)).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.timeout(180)
def test_accumulation_equals_one_big_batch(nccl: Nccl) -> None:
    nccl(accumulation, 4)


def autocast(rank: int, size: int) -> None:
    net = network()
    inputs = batches(rank, 10)
    results = []
    for wrapper in (paceline.DistributedDataParallel, TorchDDP):
        model = wrapper(copy.deepcopy(net))
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in inputs:
            with torch.autocast("cuda", torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert_equal(*results)


@pytest.mark.timeout(180)
def test_autocast_and_grad_scaler_give_the_same_bits(nccl: Nccl) -> None:
    nccl(autocast, 2)
