"""The process group of a notebook's rank on NCCL: an interrupt aborts it, and the same process forms the next one.

The notebook itself is tested in test_notebook.py, where Jupyter is installed.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.launch.rank_environment import SURVIVORS
from paceline.notebook.rank.rank_group import RankProcessGroup
from paceline.notebook.rank.rank_setup import RankIdentity
from tests.pool import Pool

ABSENT = 2


def interrupted(rank: int, size: int, folder: str) -> tuple[float, str]:
    """Rank 2 does not come to a backward. Returns how long the others took to form the next group, and the digest of a
    step in it."""
    os.environ.update(SURVIVORS, NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    group = RankProcessGroup(RankIdentity(rank, size, "cuda:0", None))
    torch.cuda.set_device(0)

    def form(number: int) -> None:
        store = f"{folder}/{number}"
        group.form({"peer_ports": [], "store": store, "backend": "cpu:gloo,cuda:nccl"})

    def train(steps: int) -> None:
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

    form(0)
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(nn.Linear(64, 8).cuda())
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    x = torch.ones(4, 64, device="cuda") * (rank + 1)
    train(1)
    if rank != ABSENT:
        abort = threading.Timer(1.0, group.abort)  # as the kernel does it, on the thread that hears requests
        abort.start()
        with pytest.raises((RuntimeError, paceline.errors.PacelineError)):
            train(3)
        abort.join()
    else:
        time.sleep(1.5)
    began = time.monotonic()
    form(1)
    taken = time.monotonic() - began
    train(1)
    value = sum(float(param.detach().double().sum()) for param in model.parameters())
    return taken, f"{value:.12f}"


@pytest.mark.timeout(120)
def test_ranks_whose_backward_was_aborted_form_their_next_group(procs: Pool, tmp_path: Path) -> None:
    found: list[Any] = procs(3).run(interrupted, str(tmp_path), group=False)
    assert len({value for _, value in found}) == 1
    assert max(seconds for seconds, _ in found) < 10
