"""Placements on a GPU, over NCCL: the bits of plain DDP, and no host that waits."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import paceline
from tests.gpu.ranks import nobody_waits
from tests.gpu.test_replica import Nccl, nccl

__all__ = ["nccl"]  # the fixture

SHARDED = ("zero1", "zero2", "zero3")
WARM = 8  # steps: buckets are planned in the first ones


class Blocks(nn.Module):
    """Repeated blocks, which become units, between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 192)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 192), nn.GELU()) for _ in range(4))
        self.last = nn.Linear(192, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        y: torch.Tensor = self.last(x)
        return y


def trained(placement: str, rank: int, dtype: torch.dtype, steps: int, clip: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().to("cuda", dtype), placement=placement, bucket_cap_mb=0.2)
    master = None if dtype is torch.float32 else torch.float32
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True, master=master)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(8, 40, generator=generator).to("cuda", dtype)
        model(inputs).float().square().mean().backward()
        if clip:
            model.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    with model.whole():
        return [param.detach().clone() for param in model.module.parameters()]


def parity(rank: int, size: int, dtype: torch.dtype, clip: bool) -> None:
    expected = trained("ddp", rank, dtype, 20, clip)
    for placement in SHARDED:
        found = trained(placement, rank, dtype, 20, clip)
        for ours, theirs in zip(found, expected, strict=True):
            if clip:  # norms are added in another order
                assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5), placement
            else:
                assert torch.equal(ours, theirs), f"{placement}: {float((ours - theirs).abs().max())}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("dtype", "clip"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_two_ranks_have_the_bits_of_ddp(nccl: Nccl, dtype: torch.dtype, clip: bool) -> None:
    nccl(parity, 2, dtype, clip)


def scaled(rank: int, size: int, placement: str) -> None:
    """A step whose gradients overflow on one rank is taken by none."""
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().cuda(), placement=placement)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(WARM):
        x = torch.full((4, 40), float("inf") if step == WARM - 1 and rank == 1 else 1.0, device="cuda")
        with model.whole():
            before = [param.detach().clone() for param in model.module.parameters()]
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with model.whole():
        after = [param.detach().clone() for param in model.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert scaler.get_scale() == 2.0**9


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", SHARDED)
def test_a_scaler_skips_a_step_on_all_ranks(nccl: Nccl, placement: str) -> None:
    nccl(scaled, 2, placement)


def without_waiting(rank: int, size: int, placement: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().to("cuda", dtype), placement=placement)
    master = None if dtype is torch.float32 else "float32"
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True, master=master)
    x = torch.randn(8, 40, device="cuda", dtype=dtype)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    with nobody_waits():
        step()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", SHARDED)
def test_no_host_waits_in_a_plain_step(nccl: Nccl, placement: str, dtype: torch.dtype) -> None:
    """Nor in one with master weights."""
    nccl(without_waiting, 2, placement, dtype)


def masters_of_whole_parameters(rank: int, size: int) -> None:
    without_waiting(rank, size, "ddp", torch.bfloat16)


@pytest.mark.timeout(180)
def test_no_host_waits_for_masters_of_whole_parameters(nccl: Nccl) -> None:
    nccl(masters_of_whole_parameters, 2)


def under_forward(rank: int, size: int, placement: str) -> None:
    """What a step has left under way is there for whoever uses a parameter, on any stream, and no host waits."""
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().cuda(), placement=placement, bucket_cap_mb=0.2)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank)).cuda()
    for number in range(WARM):
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        with nobody_waits():
            optimizer.step()
            optimizer.zero_grad()
            assert all(type(param) is not nn.Parameter for param in model.module.parameters())
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
                found = [param.detach().clone() for param in model.module.parameters()]
        torch.cuda.synchronize()
        for ours, param in zip(found, model.module.parameters(), strict=True):
            assert type(param) is nn.Parameter and torch.equal(ours, param)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_parameters_come_after_the_step(nccl: Nccl, placement: str) -> None:
    nccl(under_forward, 2, placement)


def replayed(rank: int, size: int, inside: bool) -> None:
    """What a CUDA graph reads is there when a step has ended: nothing of ours runs when it is replayed."""
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().cuda(), placement="zero1", bucket_cap_mb=0.2)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank)).cuda()

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = (model.module if inside else model)(x)
    for _ in range(3):
        step()
        assert all(type(param) is nn.Parameter for param in model.module.parameters())
        graph.replay()
        assert torch.equal(y, model.module(x))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("inside", [False, True])
def test_a_captured_forward_reads_values_that_are_there(nccl: Nccl, inside: bool) -> None:
    nccl(replayed, 2, inside)


def in_shard_groups(rank: int, size: int, placement: str) -> None:
    """Within rounding: shards are added inside shard groups first."""
    expected = trained("ddp", rank, torch.float32, 10, False)
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Blocks().cuda(), placement=placement, shard=2, bucket_cap_mb=0.2)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(rank)
    for step in range(10):
        inputs = torch.randn(8, 40, generator=generator).cuda()
        torch.cuda.synchronize()
        with nobody_waits() if step == 9 else nullcontext():
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with model.whole():
        for ours, theirs in zip(model.module.parameters(), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), float((ours - theirs).abs().max())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", SHARDED)
def test_four_ranks_in_two_shard_groups(nccl: Nccl, placement: str) -> None:
    nccl(in_shard_groups, 4, placement)


def from_meta(rank: int, size: int) -> None:
    """The values of every placement are alike, on the device."""
    found = []
    for placement in ("ddp", "zero3"):
        torch.manual_seed(3)
        with torch.device("meta"):
            net = Blocks()
        model = paceline.DistributedDataParallel(net, placement=placement)
        with model.whole():
            found.append([param.detach().clone() for param in model.module.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert ours.is_cuda and torch.equal(ours, theirs)


@pytest.mark.timeout(180)
def test_models_begin_on_meta(nccl: Nccl) -> None:
    nccl(from_meta, 2)
