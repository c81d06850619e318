"""Lanes on real ranks: one digest for every number of ranks, over shared memory and over gloo, with all randomness."""

import gc
import hashlib
import pickle
import random
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
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
        microbatches = [draw(100 * step + lane, 6, 8) for lane in model.own_lanes]
        for x in model.lanes(microbatches, step):
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


def left_of_a_replica(rank: int, size: int, transport: str, refers: bool, folder: str | None) -> list[str]:
    """What is still there of a replica that was let go of: itself, its reducer, and threads of its groups."""
    gc.collect()
    threads = len(list(Path("/proc/self/task").iterdir()))
    net: Any = Noisy()
    rules = paceline.Agreement(state_every=2, audit_every=2, capsules=folder)
    model: Any = DDP(net, lanes=LANES, seed=9, transport=transport, agreement=rules)
    if refers:
        net.trainer = {"replica": model}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for x in model.lanes([draw(10 * step + lane, 6, 8) for lane in model.own_lanes], step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watched = {"replica": weakref.ref(model), "reducer": weakref.ref(model._core), "module": weakref.ref(net)}
    del model, net, optimizer, x
    gc.collect()
    gc.collect()  # what the end of the replica has let go of
    more = len(list(Path("/proc/self/task").iterdir())) - threads
    return [name for name, known in watched.items() if known() is not None] + ["thread"] * max(0, more)


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("refers", [False, True], ids=["alone", "referred-to"])
def test_a_replica_in_lanes_leaves_nothing_behind(procs: Pool, tmp_path: Path, transport: str, refers: bool) -> None:
    procs(2).run(trained, transport)  # threads of torch's own that the first step begins
    for folder in (None, str(tmp_path)):
        assert procs(2).run(left_of_a_replica, transport, refers, folder) == [[], []]


def moved(rank: int, size: int) -> list[float] | None:
    """Half of the steps with all ranks, and half of them without the last one."""
    torch.manual_seed(5)
    model: Any = DDP(Noisy(), lanes=LANES, seed=9, transport="torch")
    fewer = dist.new_group(range(max(1, size - 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        if step == 2 and size > 1:
            if rank == size - 1:
                return None
            model._update_process_group(fewer)
        for x in model.lanes([draw(100 * step + lane, 6, 8) for lane in model.own_lanes], step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.double().flatten() for value in model.module.state_dict().values()]).tolist()


def test_lanes_are_dealt_anew_to_fewer_ranks(procs: Pool) -> None:
    (alone,) = procs(1).run(moved)
    assert procs(3).run(moved) == [alone, alone, None]


LEFT = """
import numpy, torch, paceline
world = paceline.init()
net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
model = paceline.DistributedDataParallel(net, lanes=4)
lanes = model.lanes([torch.randn(4, 8), torch.randn(4, 8)], 0)
for number, x in enumerate(lanes):
    model(x).square().mean().backward()
    if number == 1 and world.rank == 0:
        raise ValueError("a fault of the script's own")
"""


def test_a_loop_that_is_left_when_python_ends(tmp_path: Path) -> None:
    """The iterator has a name, so it is still there when the modules go."""
    (tmp_path / "script.py").write_text(LEFT)
    command = [sys.executable, "-m", "paceline.cli", "run", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert "ValueError: a fault of the script's own" in said
    assert not re.search("Exception ignored|AttributeError|SIGABRT|could not be (?:ended|killed)", said), said
