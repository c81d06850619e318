"""Lanes over NCCL: one digest for 1, 2, 3 and 4 ranks, with dropout; and replicas that are watched on a GPU."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ReplicaDrift, UsageError, WrongGradients
from paceline.reducer.unreduced import first_with_gradient
from paceline.replica.agreement import Agreement
from tests.gpu.ranks import on_nccl
from tests.models import DDP, draw

LANES = 4


def net() -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)]
    return nn.Sequential(*layers).cuda()


def trained(rank: int, size: int, out: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model: Any = DDP(net(), lanes=LANES, seed=9, bucket_cap_mb=0.02, agreement=Agreement(state_every=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(8):
        microbatches = [draw(100 * step + lane, 16, 64).cuda() for lane in model.own_lanes]
        for x in model.lanes(microbatches, step):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for value in model.module.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    Path(out, f"{size}-{rank}").write_text(digest.hexdigest())


@pytest.mark.timeout(180)
def test_every_world_gives_one_digest(procs: Any, tmp_path: Path) -> None:
    for size in (1, 2, 3, 4):
        store = str(tmp_path / f"store-{size}")
        procs(size).run(on_nccl, store, "cpu:gloo,cuda:nccl", trained, str(tmp_path), group=False, deadline_s=120)
    digests = {file.name: file.read_text() for file in tmp_path.glob("*-?") if not file.name.startswith("store")}
    assert len(digests) == 10
    assert len(set(digests.values())) == 1, digests


def drifts(rank: int, size: int) -> None:
    model: Any = DDP(net(), agreement=Agreement(state_every=2, not_finite="skip"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(poison: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            model(draw(rank, 16, 64).cuda() * poison).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    before = model.module[0].weight.detach().clone()
    step(float("inf") if rank == 1 else 1.0)
    assert torch.equal(model.module[0].weight, before), "the step was skipped"
    step(times=3)
    if rank == 1:
        model.module[3].weight.data.view(-1).view(torch.int32)[77] ^= 1 << 18
    with pytest.raises(ReplicaDrift, match="3.weight"):
        step(times=3)
    dist.barrier()


def test_drift_and_not_finite_on_a_gpu(procs: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    procs(2).run(on_nccl, store, "cpu:gloo,cuda:nccl", drifts, group=False, deadline_s=120)


def audited(rank: int, size: int, bad: int | None) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model: Any = DDP(net(), lanes=LANES, seed=9, bucket_cap_mb=0.02, agreement=Agreement(audit_every=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if rank == bad:
        model.module[3].weight.register_hook(lambda grad: torch.where(grad == grad.max(), 2 * grad, grad))

    def steps() -> None:
        for step in range(2 * LANES):
            for x in model.lanes([draw(100 * step + lane, 16, 64).cuda() for lane in model.own_lanes], step):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(x).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    if bad is None:
        steps()
        return
    with pytest.raises(WrongGradients, match=f"rank {bad} computes wrong") as caught:
        steps()
    assert caught.value.tensor == "3.weight"


@pytest.mark.parametrize("bad", [None, 1])
def test_audits_on_a_gpu(procs: Any, tmp_path: Path, bad: int | None) -> None:
    store = str(tmp_path / "store")
    procs(3).run(on_nccl, store, "cpu:gloo,cuda:nccl", audited, bad, group=False, deadline_s=120)


def waits_and_captures(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=rank, world_size=size)
    model: Any = DDP(net(), lanes=2)
    microbatches = [draw(lane, 16, 64).cuda() for lane in model.own_lanes]
    for x in model.lanes(microbatches, 0):
        model(x).square().mean().backward()
    assert first_with_gradient(model._core.bucket_set) == "0.weight"
    model.zero_grad(set_to_none=False)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        assert first_with_gradient(model._core.bucket_set) is None
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, "the host waits once, whatever the number of parameters"
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        microbatches[0].add(1)  # torch warns of graphs that are empty
        with pytest.raises(UsageError, match="cannot go into a CUDA graph"):
            next(model.lanes(microbatches, 1))
    for x in model.lanes(microbatches, 1):
        model(x).square().mean().backward()
    dist.destroy_process_group()


def test_a_step_waits_once_for_zeros_and_is_not_captured(procs: Any, tmp_path: Path) -> None:
    procs(1).run(waits_and_captures, str(tmp_path / "store"), group=False, deadline_s=60)
