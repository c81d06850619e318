"""Lanes on real ranks: one digest for every number of ranks, over shared memory and over gloo, with all randomness."""

import hashlib
import pickle
import random
from typing import Any

import numpy
import torch
from torch import nn

from tests.models import DDP, draw
from tests.pool import Pool

LANES = 4


class Noisy(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = float(numpy.random.rand()) + random.random()
        out: torch.Tensor = self.head(self.layers(x + torch.randn_like(x) * noise))
        return out


def trained(rank: int, size: int, transport: str) -> tuple[str, bool]:
    """The digest of all that was trained, and whether the generators are as they were before."""
    torch.manual_seed(5)
    model: Any = DDP(Noisy(), lanes=LANES, seed=9, transport=transport, bucket_cap_mb=1e-3)
    assert pickle.loads(pickle.dumps(model)).own_lanes == model.own_lanes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    for step in range(6):
        micros = [draw(100 * step + lane, 6, 8) for lane in model.own_lanes]
        for x in model.lanes(micros, step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    untouched = (
        torch.equal(torch.get_rng_state(), state[0])
        and random.getstate() == state[1]
        and repr(numpy.random.get_state()) == state[2]
    )
    digest = hashlib.sha256()
    for value in model.module.state_dict().values():
        digest.update(value.numpy().tobytes())
    for moments in optimizer.state.values():
        digest.update(moments["exp_avg_sq"].numpy().tobytes())
    return digest.hexdigest(), untouched


def test_every_world_and_transport_gives_one_digest(procs: Pool) -> None:
    found = {}
    for size, transport in [(1, "torch"), (2, "shm"), (2, "torch"), (3, "shm"), (3, "torch"), (4, "shm"), (4, "torch")]:
        results = procs(size).run(trained, transport)
        assert len({digest for digest, _ in results}) == 1
        assert all(untouched for _, untouched in results)
        found[size, transport] = results[0][0]
    assert len(set(found.values())) == 1, found
