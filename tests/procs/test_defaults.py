"""`torch.set_default_device` and `torch.set_default_dtype` are for the tensors of users, and not for ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.strategies.cast import Wide, Wire
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.power_sgd import PowerSGD
from paceline.strategies.top_k import TopK
from tests.models import DDP, assert_same_bits, draw, mlp, packed, seeded, unpacked, values
from tests.pool import Pool

RANKS = 2


class Uneven(nn.Module):
    """Some parameters take no part on some ranks, some gradients are sparse, and there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.words = nn.Embedding(5, 3, sparse=True)
        self.norm = nn.BatchNorm1d(3)
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        skips = x[0, 0] < 0  # which is so on some ranks
        x = self.norm(self.first(x)) + self.words((x[:, 0] > 0).long())
        return x if skips else self.second(x)


def lanes_module() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))


def plain(model: Any, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def joined(model: Any, batches: list[torch.Tensor]) -> None:
    with model.join():
        plain(model, batches[: 3 + model._core.transport.rank])


def in_lanes(model: Any, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for x in model.lanes([batches[3 * step + lane] for lane in model.own_lanes], step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def drifted(model: Any, batches: list[torch.Tensor]) -> None:
    plain(model, batches[:2])
    with torch.no_grad():
        model.module[0].weight.add_(model._core.transport.rank)
    plain(model, batches[2:])


HEALS = paceline.Agreement(state_every=1, drift="heal", trust=0, not_finite="skip")
JOBS: dict[str, tuple[Callable[..., None], Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "shared memory": (plain, lambda: mlp(3, 8, 2), lambda: {"transport": "shm"}),
    "torch.distributed": (plain, lambda: mlp(3, 8, 2), lambda: {"transport": "torch"}),
    "bfloat16 on the wire": (plain, lambda: mlp(3, 8, 2), lambda: {"reduction": Wire(torch.bfloat16)}),
    "wide sums": (plain, lambda: mlp(3, 8, 2), lambda: {"reduction": Wide()}),
    "PowerSGD": (plain, lambda: mlp(9, 9, 9), lambda: {"reduction": PowerSGD(rank=1, start_step=0)}),
    "TopK": (plain, lambda: mlp(3, 8, 2), lambda: {"reduction": TopK(0.5)}),
    "fixed order": (plain, Uneven, lambda: {"reduction": FixedOrder(), "transport": "torch"}),
    "uneven": (plain, Uneven, dict),
    "join": (joined, lambda: mlp(3, 8, 2), dict),
    "lanes": (in_lanes, lanes_module, lambda: {"lanes": 4}),
    "lanes over torch.distributed": (in_lanes, lanes_module, lambda: {"lanes": 4, "transport": "torch"}),
    "drift": (drifted, lambda: mlp(3, 8, 2), lambda: {"init": "verify", "agreement": HEALS}),
}


def run_job(rank: int, _: int, name: str, others: bool) -> bytes:
    job, make, settings = JOBS[name]
    module, width = make(), 9 if name == "PowerSGD" else 3
    batches = [draw(10 * step + rank, 2, width) for step in range(14)]
    try:
        if others:
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float64)
        job(DDP(module, timeout=20, **settings()), batches)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return packed(values(module))


@pytest.mark.parametrize("name", JOBS)
def test_a_replica_trains_as_without_them(procs: Pool, name: str) -> None:
    expected, got = (procs(RANKS).run(run_job, name, others) for others in (False, True))
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(unpacked(one), unpacked(other))


def sample(rank: int, size: int, others: bool) -> list[int]:
    data: Any = range(20)
    try:
        if others:
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float64)
        return list(paceline.DistributedSampler(data, num_replicas=size, rank=rank))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_samples_come_in_the_same_order(procs: Pool) -> None:
    assert procs(RANKS).run(sample, True) == procs(RANKS).run(sample, False)
