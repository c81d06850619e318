"""Stamps with the times of the device: what they tell, and that nobody waits for them."""

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.device_clock import by_device
from paceline.observe.timeline import SpanKind, mean_ms, read_overlap, read_timeline
from paceline.trace import Moment, Stamp
from paceline.traffic import CollectiveKind
from tests.gpu.ranks import nobody_waits
from tests.gpu.test_replica import Nccl, nccl

__all__ = ["nccl"]  # the fixture

SECOND = 1_900_000_000  # cycles; an H200 makes 1.98e9 in a second
WARM = 8  # steps: buckets are planned in the first ones
OF_COLLECTIVES = (Moment.LAUNCHED, Moment.COMPLETED, Moment.WAIT_ENTERED, Moment.WAIT_LEFT)


class Blocks(nn.Module):
    """Repeated blocks, which become units, between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(4))
        self.last = nn.Linear(256, 4)
        self.sleeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleeps:
            torch.cuda._sleep(SECOND)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        y: torch.Tensor = self.last(x)
        return y


class Training:
    def __init__(self, rank: int, placement: str = "ddp", **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Blocks().cuda()
        self.model: Any = paceline.DistributedDataParallel(self.net, placement=placement, bucket_cap_mb=0.2, **options)
        self.optimizer = self.model.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        self.x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).cuda()
        for _ in range(WARM):
            self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traced(self, steps: int = 2) -> list[Stamp]:
        """The stamps of some steps with the times of the device, in which nobody waited."""
        before = len(self.model.trace.stamps())
        self.model.trace.device_times = True
        for _ in range(steps):
            with nobody_waits():
                self.step()
            torch.cuda.synchronize()
        self.model.trace.device_times = False
        found: list[Stamp] = self.model.trace.stamps()[before:]
        return found


def of_buckets(rank: int, size: int) -> None:
    training = Training(rank)
    assert all(stamp.device is None for stamp in training.model.trace.stamps()), "nobody has asked"
    assert read_overlap(training.model.trace.stamps()) == {}
    stamps = training.traced()
    assert all(stamp.device is not None and stamp.device.ns is not None for stamp in stamps)
    buckets = training.model.layout.buckets
    last = max(stamp.backward for stamp in stamps)
    for bucket in buckets:
        mine = [stamp for stamp in by_device(stamps) if (stamp.backward, stamp.bucket) == (last, bucket.index)]
        at = {stamp.moment: stamp.ns for stamp in mine}
        assert at[Moment.LAUNCHED] < at[Moment.COMPLETED]
        assert at[Moment.WAIT_ENTERED] <= at[Moment.WAIT_LEFT]
        told = {stamp.collective for stamp in mine if stamp.moment in OF_COLLECTIVES}
        assert {(what.kind, what.nbytes) for what in told if what is not None} == {
            (CollectiveKind.ALL_REDUCE, bucket.nbytes)
        }
    overlap = read_overlap(stamps)
    assert 0 <= overlap["overlap"] <= 1
    assert overlap["communication_s"] > 0
    means = mean_ms(read_timeline(stamps))
    assert means["forward"] > 0 and means["backward"] > 0 and means["optimizer"] > 0
    # What is read later goes on to tell the same, also when the times are not asked for any more.
    training.step()
    torch.cuda.synchronize()
    assert read_overlap(training.model.trace.stamps()) == overlap


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_a_buckets_collective_has_the_times_of_the_device(nccl: Nccl, backend: str) -> None:
    nccl(of_buckets, 2, backend=backend)


def behind_a_sleeping_device(rank: int, size: int) -> None:
    training = Training(rank)
    training.net.sleeps = True
    spans = read_timeline(training.traced(steps=1))
    forward = sum(span.end_ns - span.begin_ns for span in spans if span.kind is SpanKind.FORWARD)
    assert forward > 0.5e9, "the host had queued it in no time"


@pytest.mark.timeout(180)
def test_a_forward_takes_as_long_as_the_device_does(nccl: Nccl) -> None:
    nccl(behind_a_sleeping_device, 2)


def behind_a_late_peer(rank: int, size: int) -> None:
    training = Training(rank)
    plain = read_overlap(training.traced(steps=1))
    training.net.sleeps = rank == 1
    late = read_overlap(training.traced(steps=1))
    if rank == 0:
        waited = late["exposed_communication_s"] - plain["exposed_communication_s"]
        assert waited > 0.5, f"{late} beside {plain}"


@pytest.mark.timeout(180)
def test_waiting_for_the_device_of_a_peer_is_exposed(nccl: Nccl) -> None:
    nccl(behind_a_late_peer, 2)


def gathers(rank: int, size: int, placement: str) -> None:
    training = Training(rank, placement)
    stamps = training.traced()
    found = [
        stamp for stamp in by_device(stamps) if stamp.collective and stamp.collective.kind is CollectiveKind.GATHER
    ]
    moments = [stamp.moment for stamp in found]
    assert set(moments) == set(OF_COLLECTIVES)
    assert moments.count(Moment.LAUNCHED) == moments.count(Moment.COMPLETED)
    named = {stamp.collective.of for stamp in found if stamp.collective}
    assert ("blocks.2" in named) == (placement == "zero3")
    scattered = [s for s in stamps if s.collective and s.collective.kind is CollectiveKind.REDUCE_SCATTER]
    assert {stamp.bucket for stamp in scattered} == {bucket.index for bucket in training.model.layout.buckets}
    assert read_timeline(stamps)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_gathers_have_the_times_of_the_device(nccl: Nccl, placement: str) -> None:
    nccl(gathers, 2, placement)


def parity(rank: int, size: int, placement: str) -> None:
    """Memory that a gather reads, or a reduction, is not given away early."""
    found = []
    for device_times in (False, True):
        training = Training(rank, placement)
        training.model.trace.device_times = device_times
        for _ in range(12):
            training.step()
        with training.model.whole():
            found.append([param.detach().clone() for param in training.net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3"])
def test_times_of_the_device_change_no_bits(nccl: Nccl, placement: str) -> None:
    nccl(parity, 2, placement)


def captured(rank: int, size: int) -> None:
    training = Training(rank)
    training.model.trace.device_times = True
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = training.model(training.x)
    graph.replay()
    assert torch.equal(y, training.net(training.x))
    training.step()
    torch.cuda.synchronize()
    assert read_overlap(training.model.trace.stamps())["communication_s"] > 0


@pytest.mark.timeout(180)
def test_a_graph_is_captured_while_times_are_asked_for(nccl: Nccl) -> None:
    nccl(captured, 2)


def hooked(rank: int, size: int) -> None:
    """A hook's work is stamped as complete when the host has seen that."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    model: Any = paceline.DistributedDataParallel(Blocks().cuda())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model.trace.device_times = True
    for _ in range(3):
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    stamps = model.trace.stamps()
    assert {stamp.moment for stamp in stamps} >= {Moment.LAUNCHED, Moment.WAIT_LEFT}
    assert all(value >= 0 for value in read_overlap(stamps).values())
    assert read_timeline(stamps)


@pytest.mark.timeout(180)
def test_hooks_are_traced(nccl: Nccl) -> None:
    nccl(hooked, 2)
