"""Placements where things go wrong, over real processes: what cannot be had is an error by name on every rank."""

import gc
import os
import signal
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.replica.live import all_replicas
from tests.models import draw, mlp
from tests.pool import Pool

SHARDED = ("zero1", "zero2", "zero3")
TRANSPORTS = ("shm", "torch")


def wrap(net: nn.Module, transport: str, placement: str = "zero3", **arguments: Any) -> Any:
    return paceline.DistributedDataParallel(net, placement=placement, transport=transport, timeout=5, **arguments)


class Experts(nn.Module):
    """A trunk, and units of which a call takes one."""

    def __init__(self, other_width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.experts = nn.ModuleList([mlp(8, 8, 8), mlp(8, other_width, 8)])

    def forward(self, x: torch.Tensor, expert: int) -> Any:
        return self.experts[expert](self.trunk(x))


def take_other_experts(rank: int, size: int, transport: str, other_width: int) -> None:
    model = wrap(Experts(other_width), transport)
    model(draw(rank, 4, 8), 0).sum().backward()
    model(draw(rank, 4, 8), rank).sum().backward()


# gloo ends a process that offers another size than the others.
@pytest.mark.parametrize(("transport", "other_width"), [("shm", 8), ("shm", 3000), ("torch", 8)])
def test_ranks_that_run_different_units_are_named(procs: Pool, transport: str, other_width: int) -> None:
    for outcome in procs(2).attempt(take_other_experts, transport, other_width):
        assert isinstance(outcome.error, paceline.errors.CollectiveMismatch)
        expected = "is gathering the parameters of experts." if other_width == 8 else "Every rank must issue the same"
        assert expected in str(outcome.error)
    assert procs(2).run(count_replicas) == [0, 0]


def count_replicas(rank: int, size: int) -> int:
    """Those that nothing but a traceback could have kept alive."""
    gc.collect()
    return len(all_replicas())


def overflow_in_one_shard(rank: int, size: int, placement: str, transport: str) -> list[float]:
    model = wrap(mlp(8, 64, 64, 5), transport, placement)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scales = []
    for number in range(4):
        scaler.scale(model(draw(10 * rank + number, 4, 8)).square().mean()).backward()
        if number == 2 and rank == size - 1:
            next(p for p in optimizer.param_groups[0]["params"] if p.numel()).grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    with model.whole():
        return [*scales, *(float(param.detach().double().sum()) for param in model.module.parameters())]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("placement", SHARDED)
def test_all_ranks_skip_a_step_that_one_would_skip(procs: Pool, placement: str, transport: str) -> None:
    first, *others = procs(3).run(overflow_in_one_shard, placement, transport)
    assert first[:4] == [16.0, 16.0, 8.0, 8.0]
    assert all(other == first for other in others)


def make_other_optimizers(rank: int, size: int, placement: str, transport: str) -> None:
    model = wrap(mlp(8, 64, 5), transport, placement)
    model.optimizer(torch.optim.SGD if rank else torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("placement", SHARDED)
def test_ranks_with_different_optimizers_are_told(procs: Pool, placement: str, transport: str) -> None:
    for outcome in procs(2).attempt(make_other_optimizers, placement, transport):
        assert isinstance(outcome.error, paceline.errors.ModelMismatch)
        assert "class is AdamW on rank 0 and SGD on rank 1" in str(outcome.error)


def fail_in_backward(rank: int, size: int, transport: str) -> str:
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    model = wrap(net, transport)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
    if rank:
        net[2].register_full_backward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):  # a script that goes on after an error
        model(draw(rank, 4, 40)).sum().backward()
    optimizer.zero_grad()
    model(draw(rank, 4, 40))
    return "nobody was told"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_backward_under_zero3_ends_every_rank_by_name(procs: Pool, transport: str) -> None:
    other, failed = procs(2).attempt(fail_in_backward, transport)
    assert isinstance(failed.error, paceline.errors.IllegalMove) and "restart all ranks" in str(failed.error)
    assert isinstance(other.error, paceline.errors.CollectiveError) and "rank 1" in str(other.error)
    assert other.seconds < 20


def die_in_backward(rank: int, size: int, placement: str, transport: str) -> None:
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)))
    model = wrap(net, transport, placement, bucket_cap_mb=0.005)
    model(draw(rank, 4, 40)).sum().backward()
    if rank:
        net[5].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(draw(rank, 4, 40)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("placement", SHARDED)
def test_a_rank_that_dies_in_backward_is_named(procs: Pool, placement: str, transport: str) -> None:
    survivor, killed = procs(2).attempt(die_in_backward, placement, transport)
    assert killed.exit_code == -signal.SIGKILL
    assert isinstance(survivor.error, paceline.errors.PeerLost) and survivor.error.ranks == (1,)
    assert survivor.seconds < 10


def let_go(rank: int, size: int, placement: str, transport: str) -> int:
    """How many of the things that a replica was made of, and of the graphs that it has computed, are still there."""
    model = wrap(nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))), transport, placement)
    optimizer = model.optimizer(torch.optim.AdamW)
    kept: list[Any] = []
    for number in range(4):
        out = model(draw(rank, 4, 40).requires_grad_())
        node = out.grad_fn
        for _ in range(3):  # into a unit that is not the last one
            node = next(function for function, _ in node.next_functions if function.name() == "AddmmBackward0")
        kept.append(weakref.ref(node.metadata.setdefault("kept", nn.Module())))
        if number > 1:
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del out, node
    kept.append(weakref.ref(model._owned))
    del model, optimizer
    gc.collect()
    return sum(one() is not None for one in kept)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("placement", SHARDED)
def test_a_replica_leaves_nothing_behind(procs: Pool, placement: str, transport: str) -> None:
    assert procs(2).run(let_go, placement, transport) == [0, 0]
