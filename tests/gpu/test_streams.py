"""Gradients, buckets and streams: nothing is read before it is written, and nothing waits that need not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from tests.gpu.test_replica import Nccl, assert_equal, batches, nccl, network, train

__all__ = ["nccl"]  # the fixture


def on_a_side_stream(rank: int, size: int) -> None:
    net, inputs = network(), batches(rank, 10)
    results = []
    for wrapper in (paceline.DistributedDataParallel, TorchDDP):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # torch's class must be built there too, or it warns
            model = wrapper(copy.deepcopy(net), bucket_cap_mb=0.1)
            results.append(train(model, inputs))
        torch.cuda.current_stream().wait_stream(stream)
    assert_equal(*results)


@pytest.mark.timeout(180)
def test_training_on_a_side_stream(nccl: Nccl) -> None:
    nccl(on_a_side_stream, 2)


class TwoStreams(nn.Module):
    """Half of the network runs on a stream of its own, so its gradients are made there too."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(64, 512)
        self.there = nn.Linear(64, 512)
        self.other: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other = self.other or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self.other.wait_stream(current)
        with torch.cuda.stream(self.other):
            torch.cuda._sleep(2_000_000)
            there = self.there(x).square()
        here = self.here(x).square()
        current.wait_stream(self.other)
        there.record_stream(current)
        return torch.cat([here, there])


def on_two_streams(rank: int, size: int) -> None:
    torch.manual_seed(0)
    net = TwoStreams().cuda()
    expected = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net)
    for step in range(10):
        everyone = [batches(r, 1)[0] + step for r in range(size)]
        model.zero_grad()
        model(everyone[rank]).mean().backward()
        expected.zero_grad()
        sum(expected(x).mean() / size for x in everyone).backward()
        torch.cuda.synchronize()
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.timeout(180)
def test_gradients_of_one_bucket_from_two_streams(nccl: Nccl) -> None:
    nccl(on_two_streams, 2)


def several_replicas(rank: int, size: int) -> None:
    nets = [network() for _ in range(3)]
    models = [paceline.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.1) for net in nets]
    x = batches(rank, 1)[0]
    losses: Any = [model(x).square().mean() for model in models]
    sum(losses).backward()  # their buckets interleave
    for net, model in zip(nets, models, strict=True):
        for r in range(size):
            (net(batches(r, 1)[0]).square().mean() / size).backward()
        for mine, theirs in zip(model.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.timeout(180)
def test_several_replicas_in_one_backward(nccl: Nccl) -> None:
    nccl(several_replicas, 2)


def captured(rank: int, size: int) -> None:
    """A whole step as a CUDA graph, as torch documents it for its own class."""
    net = network()
    eager = train(paceline.DistributedDataParallel(copy.deepcopy(net), bucket_plan="fixed"), batches(rank, 12))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = paceline.DistributedDataParallel(copy.deepcopy(net), bucket_plan="fixed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    inputs = batches(rank, 12)
    static = inputs[0].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(static).square().mean().backward()
        optimizer.step()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in inputs[:11]:
            static.copy_(x)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=stream):
        step()
    static.copy_(inputs[11])
    graph.replay()
    torch.cuda.synchronize()
    for mine, theirs in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


@pytest.mark.timeout(180)
def test_a_whole_step_can_be_captured(nccl: Nccl) -> None:
    nccl(captured, 2)


def alone(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=rank, world_size=size)
    net = network()
    bare = copy.deepcopy(net)
    before = torch.cuda.memory_allocated()
    model = paceline.DistributedDataParallel(net)
    assert torch.cuda.memory_allocated() == before
    assert_equal(train(model, batches(0, 5)), train(bare, batches(0, 5)))
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_a_world_of_one_costs_no_memory(procs: Any, tmp_path: Path) -> None:
    procs(1).run(alone, str(tmp_path / "store"), group=False, deadline_s=60)


def wide_or_narrow(rank: int, size: int) -> None:
    from paceline.strategies.cast import Wire

    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False).cuda().bfloat16()
    grads = []
    for reduction in (None, Wire(torch.float32)):
        model = paceline.DistributedDataParallel(copy.deepcopy(net), reduction=reduction)
        model(batches(rank, 1)[0].bfloat16()).float().square().mean().backward()
        (param,) = model.parameters()
        assert param.grad.dtype is torch.bfloat16
        grads.append(param.grad.float())
    parts = torch.stack(_local_grads(net, size)).float()
    wide = parts.mean(0).bfloat16().float()
    assert torch.equal(grads[1], wide), "summed in float32, rounded once"
    torch.testing.assert_close(grads[0], wide, rtol=2e-2, atol=1e-4)


def _local_grads(net: nn.Module, size: int) -> list[torch.Tensor]:
    found = []
    for rank in range(size):
        net.zero_grad()
        net(batches(rank, 1)[0].bfloat16()).float().square().mean().backward()
        (param,) = net.parameters()
        assert param.grad is not None
        found.append(param.grad.clone())
    return found


@pytest.mark.timeout(180)
def test_bfloat16_gradients_are_reduced_narrow_or_wide(nccl: Nccl) -> None:
    nccl(wide_or_narrow, 2)
