"""In a step that goes well no host waits for its device, nor for another rank's host."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.gpu.ranks import nobody_waits
from tests.gpu.test_replica import Nccl, nccl
from tests.pool import RankFailed

__all__ = ["nccl"]  # the fixture

SECOND = 1_900_000_000  # cycles; an H200 makes 1.98e9 in a second
WARM = 8  # steps: buckets are planned in the first ones
LATE_S = 0.2
SLACK_S = 0.02


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        self.sleeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleeps:
            torch.cuda._sleep(SECOND)
        y: torch.Tensor = self.layers(x)
        return y


def trained(**options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = Sleepy().cuda()
    model = paceline.DistributedDataParallel(net, bucket_cap_mb=0.5, **options)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    x = torch.randn(16, 256, device="cuda")

    def step() -> float:
        """Seconds until the host has queued forward, backward and update."""
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    return net, model, step


def behind_a_sleeping_device(rank: int, size: int, options: dict[str, Any]) -> None:
    net, _, step = trained(**options)
    plain = min(step() for _ in range(5))
    torch.cuda.synchronize()
    net.sleeps = True
    with nobody_waits():
        asleep = step()
    began = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - began > 0.5, "the device slept"
    assert asleep < plain + SLACK_S, f"{asleep * 1e3:.1f} ms beside {plain * 1e3:.1f} ms"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize(
    "options", [{}, {"agreement": paceline.Agreement(not_finite="skip", state_every=4)}], ids=["defaults", "skip"]
)
def test_the_host_does_not_wait_for_its_device(nccl: Nccl, backend: str, options: dict[str, Any]) -> None:
    nccl(behind_a_sleeping_device, 2, options, backend=backend)


def behind_a_late_peer(rank: int, size: int) -> None:
    _, _, step = trained()
    plain = min(step() for _ in range(5))
    torch.cuda.synchronize()
    if rank:
        time.sleep(LATE_S)
    taken = step()
    torch.cuda.synchronize()
    assert taken < plain + SLACK_S, f"{taken * 1e3:.1f} ms beside {plain * 1e3:.1f} ms"


@pytest.mark.timeout(180)
def test_the_host_does_not_wait_for_a_late_peer(nccl: Nccl) -> None:
    nccl(behind_a_late_peer, 2)


def beside_a_dead_peer(rank: int, size: int, result: str, options: dict[str, Any]) -> None:
    _, _, step = trained(**options)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            step()
            torch.cuda.synchronize()  # would wait for ever
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        Path(f"{result}.{rank}").write_text(f"{time.monotonic() - began:.1f} s: {type(error).__name__}: {error}")
    os._exit(0)  # the group is of no use


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {}), (2, {"placement": "zero2"}), (4, {"placement": "zero3", "shard": 2})],
    ids=["ddp", "zero2", "zero3 shard=2"],
)
def test_a_dead_peer_is_named_though_the_host_is_blocked(
    nccl: Nccl, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    with pytest.raises(RankFailed):  # all have ended
        nccl(beside_a_dead_peer, size, str(tmp_path / "told"), options)
    for rank in {*range(size)} - {1}:
        told = (tmp_path / f"told.{rank}").read_text()
        assert "PeerLost: " in told and "rank 1" in told, told
        assert float(told.split()[0]) < 10


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        z: torch.Tensor = self.sometimes(y) if use else y
        return z


def unused_on_one_rank(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Branch().cuda())
    alone = Branch().cuda()
    alone.load_state_dict(model.module.state_dict())
    xs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)).cuda() for r in range(size)]
    for step in range(10):
        uses = [step % 4 != 3 and r == step % 2 for r in range(size)]
        model.zero_grad()
        alone.zero_grad()
        model(xs[rank], uses[rank]).sum().backward()
        for x, use in zip(xs, uses, strict=True):
            (alone(x, use).sum() / size).backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), step
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.timeout(180)
def test_parameters_that_one_rank_does_not_use(nccl: Nccl) -> None:
    nccl(unused_on_one_rank, 2)


def weighted(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(nn.Linear(8, 4).cuda().bfloat16())
    for step in range(8):
        tokens = [3 + (step * 5 + r * 7) % 11 for r in range(size)]
        xs = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).cuda().bfloat16() for n in tokens]
        model.zero_grad()
        with model.weight(tokens[rank]):
            model(xs[rank]).float().square().mean().backward()
        expected = torch.cat([model.module(x) for x in xs]).float().square().mean()
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        for mine, theirs in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(mine.grad, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.timeout(180)
def test_weights_are_divided_by_on_the_device(nccl: Nccl) -> None:
    nccl(weighted, 2)


def weighted_without_one_rank(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(nn.Linear(8, 4).cuda())
    for step in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()
        model.zero_grad()
        if rank == 1 and step % 3 == 2:
            model.skip_batch()
        else:
            with model.weight(4):
                model(x).square().mean().backward()
        wanted = torch.autograd.grad(model.module(x).square().mean(), list(model.parameters()))
        for mine, theirs in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(mine.grad, theirs)


@pytest.mark.timeout(180)
def test_a_rank_that_skips_its_batch_gets_the_weighted_mean_of_the_others(nccl: Nccl) -> None:
    nccl(weighted_without_one_rank, 2)


def aborted(rank: int, size: int, fused: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda()
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    x = torch.randn(4, 8, device="cuda")

    def step(fails: bool = False) -> None:
        # The gradients of the second layer have come when this fails.
        fault = net[0].register_forward_hook(lambda _, __, y: y.register_hook(lambda _: 1 / 0) and None)
        if not fails:
            fault.remove()
        output = model(x)
        fault.remove()
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            step(fails=True)
    else:
        step()
    changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert changed == (rank == 0 and not fused), "a fused optimizer is stopped on the device"
    said = "no rank applied the update" if fused else "lacked the gradients of that rank"
    said = "the other ranks learned about reduction" if rank == 1 else said
    with pytest.raises(paceline.errors.BackwardAborted, match=said):
        step()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fused", [True, False])
def test_an_aborted_backward_of_another_rank(nccl: Nccl, fused: bool) -> None:
    nccl(aborted, 2, fused)


def not_finite(rank: int, size: int, mode: str, fused: bool) -> None:
    torch.manual_seed(0)
    agreement = paceline.Agreement(not_finite=mode, patience=100)
    model = paceline.DistributedDataParallel(nn.Linear(8, 4).cuda(), agreement=agreement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    x = torch.randn(4, 8, device="cuda")
    raised = 0
    for step in range(WARM + 6):
        bad = step == WARM + 2 and rank == size - 1
        before = [p.detach().clone() for p in model.parameters()]
        try:
            model(x * float("nan") if bad else x).square().mean().backward()
            optimizer.step()
        except paceline.errors.NotFiniteGradients as error:
            raised += 1
            assert f"rank {size - 1}" in str(error) if size > 1 else "this rank" in str(error)
        optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())
        if step == WARM + 2:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert raised == (mode == "raise")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_update_on_gradients_that_are_not_finite_is_not_made(nccl: Nccl, size: int, mode: str, fused: bool) -> None:
    nccl(not_finite, size, mode, fused)


def let_go_of(rank: int, size: int) -> None:
    """The device comes to the last update only after the replica is gone."""
    torch.manual_seed(0)
    results = []
    for sleeps in (False, True):
        torch.manual_seed(1)
        model = paceline.DistributedDataParallel(nn.Linear(512, 512).cuda(), placement="zero1")
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        net: Any = model.module
        model(torch.ones(4, 512, device="cuda")).square().mean().backward()
        if sleeps and rank == 0:
            torch.cuda._sleep(SECOND)
        optimizer.step()
        del model, optimizer
        results.append(net.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.timeout(180)
def test_what_a_replica_has_queued_is_computed_after_it_is_gone(nccl: Nccl) -> None:
    nccl(let_go_of, 2)
