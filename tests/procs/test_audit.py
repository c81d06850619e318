"""Audits on real ranks: whose gradients have a flipped bit is named, with all randomness, over every transport."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import WrongGradients
from paceline.replica.agreement import Agreement
from tests.models import DDP, draw
from tests.pool import Pool
from tests.procs.test_lanes import Noisy

LANES = 4


def trained(
    rank: int, size: int, transport: str, every: int, bad: int | None
) -> tuple[float, tuple[int, ...], bool, str]:
    """A digest of the weights, and whom an audit has named."""
    torch.manual_seed(5)
    agreement = Agreement(audit_every=every)
    model: Any = DDP(Noisy(), lanes=LANES, seed=9, transport=transport, bucket_cap_mb=1e-3, agreement=agreement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if rank == bad:
        model.module.head.weight.register_hook(flipped)
    named: tuple[tuple[int, ...], bool, str] = (), False, ""
    for step in range(6):
        try:
            for x in model.lanes([draw(100 * step + lane, 6, 8) for lane in model.own_lanes], step):
                model(x).square().mean().backward()
        except WrongGradients as error:
            named = error.ranks, error.known, error.tensor
            break
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([value.double().flatten() for value in model.module.state_dict().values()])
    return float(weights.sum()), *named


def moved(rank: int, size: int, every: int) -> list[float] | None:
    """The last rank goes while an audit is under way on the others, and they go on without it."""
    torch.manual_seed(5)
    model: Any = DDP(Noisy(), lanes=LANES, seed=9, transport="torch", agreement=Agreement(audit_every=every))
    fewer = dist.new_group(range(size - 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        if step == 3:
            left = model.lanes([draw(lane, 6, 8) for lane in model.own_lanes], step)
            for _ in model.own_lanes:  # then the audit would follow
                model(next(left)).square().mean().backward()
            dist.barrier()
            if rank == size - 1:
                return None
            model._update_process_group(fewer)
            optimizer.zero_grad()
        for x in model.lanes([draw(100 * step + lane, 6, 8) for lane in model.own_lanes], step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.double().flatten() for value in model.module.state_dict().values()]).tolist()


def flipped(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1).view(torch.int32)[7] ^= 1 << 3
    return grad


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (2, "torch"), (3, "shm"), (3, "torch"), (4, "shm")])
def test_the_rank_is_named_and_others_are_not(procs: Pool, size: int, transport: str) -> None:
    quiet = {result[0] for result in procs(size).run(trained, transport, 0, None)}
    audited = procs(size).run(trained, transport, 1, None)
    assert {result[0] for result in audited} == quiet
    assert all(ranks == () for _, ranks, _, _ in audited)
    for bad in range(1, size):
        for _, ranks, known, tensor in procs(size).run(trained, transport, 1, bad):
            assert tensor == "head.weight"
            if size == 2:
                assert (set(ranks), known) == ({0, 1}, False), "one of two: both give the same bits every time"
            else:
                assert (ranks, known) == ((bad,), True)


def test_an_audit_that_a_move_to_other_ranks_cuts_short(procs: Pool) -> None:
    quiet = procs(3).run(moved, 0)
    assert quiet[2] is None
    assert procs(3).run(moved, 1) == quiet
