"""Reductions over NCCL: equal on all ranks, in a fixed order where that is promised, and on any stream."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.collectives.tree_sum import tree_sum
from paceline.strategies.names import NAMES, by_name
from paceline.strategies.power_sgd import PowerSGD
from tests.gpu.ranks import on_nccl

BOTH = "cpu:gloo,cuda:nccl"


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 250), nn.GELU(), nn.Linear(250, 7)).cuda()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).cuda()


def same_on_all_ranks(tensors: list[torch.Tensor], size: int) -> bool:
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    every = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(every, flat)
    return all(torch.equal(other, every[0]) for other in every)


def trains(rank: int, size: int, name: str) -> None:
    reduction = PowerSGD(rank=2, start_step=1) if name == "powersgd" else by_name(name)
    model = paceline.DistributedDataParallel(network(), reduction=reduction, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # on which rank 0 sends its parameters
    with torch.cuda.stream(side):
        for _ in range(20):
            loss = model(batch(rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    torch.cuda.synchronize()
    assert same_on_all_ranks(list(model.parameters()), size)
    assert losses[-1] < losses[0]


def has_a_fixed_order(rank: int, size: int) -> None:
    expected: list[torch.Tensor] | None = None
    for cap in (1e-6, 25):
        model: Any = paceline.DistributedDataParallel(network(), reduction=by_name("fixed-order"), bucket_cap_mb=cap)
        model(batch(rank)).square().mean().backward()
        got = [param.grad.clone() for param in model.parameters()]
        if expected is None:
            bare = network()
            parts = []
            for other in range(size):
                bare.zero_grad()
                bare(batch(other)).square().mean().backward()
                parts.append([param.grad.clone() for param in bare.parameters() if param.grad is not None])
            expected = [tree_sum(part) / size for part in zip(*parts, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_reduction_trains_alike_on_all_ranks(procs: Any, tmp_path: Path, name: str) -> None:
    procs(2).run(on_nccl, str(tmp_path / "store"), BOTH, trains, name, group=False, deadline_s=120)


@pytest.mark.parametrize("size", [2, 3])
def test_the_order_is_that_of_the_tree(procs: Any, tmp_path: Path, size: int) -> None:
    procs(size).run(on_nccl, str(tmp_path / "store"), BOTH, has_a_fixed_order, group=False, deadline_s=120)
