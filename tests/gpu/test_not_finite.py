"""Sums that are not finite on NCCL: noticed without making the host wait."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import Op, TorchDistTransport, finish
from tests.gpu.ranks import nobody_waits, on_nccl

INF, NAN = float("inf"), float("nan")


def finds_on_a_device(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    transport = TorchDistTransport(dist.group.WORLD)
    device = torch.device("cuda", torch.cuda.current_device())
    finish(transport.all_reduce(torch.ones(1, device=device)), what="connect", watch=transport.watch, timeout_s=60)
    transport.find_not_finite(True)
    spoiler = size - 1
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        for value, op in ((1.0, Op.SUM), (NAN, Op.SUM), (INF, Op.MEAN), (-INF, Op.TREE)):
            flat = torch.ones(100_000, dtype=dtype, device=device)
            flat[-1] = value if rank == spoiler else 1.0
            out = torch.empty_like(flat)
            with nobody_waits():
                transport.all_reduce(flat, op).wait(60)
                transport.exchange(out, flat).wait(60)
            # After the sum what is exchanged is spoilt on all ranks.
            expected = set() if value == 1.0 else {rank}
            assert transport.not_finite() == expected, (dtype, value)
            flat = torch.ones(10, dtype=dtype)  # on the host, so that it is staged where there is NCCL alone
            flat[3] = value if rank == spoiler else 1.0
            finish(transport.all_reduce(flat), what="a host tensor", watch=transport.watch, timeout_s=60)
            assert transport.not_finite() == (expected if rank == spoiler else set()), (dtype, value)
    flat = torch.full((10,), 60000, dtype=torch.float16, device=device)
    finish(transport.all_reduce(flat), what="an overflow", watch=transport.watch, timeout_s=60)
    assert transport.not_finite() == {rank}
    flat = torch.full((10,), 30000, dtype=torch.float16, device=device)
    finish(transport.all_reduce(flat), what="large numbers", watch=transport.watch, timeout_s=60)
    assert transport.not_finite() == set()


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_what_is_not_finite_is_found(procs: Any, tmp_path: Path, backend: str) -> None:
    procs(2).run(on_nccl, str(tmp_path / "store"), backend, finds_on_a_device, group=False, deadline_s=120)
