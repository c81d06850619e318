"""Where gradients, groups, hooks, threads and copies meet: right numbers, or an error on every rank."""

import copy
import gc
import os
import tempfile
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import paceline
from paceline.errors import BackwardAborted, IllegalMove
from paceline.strategies.fixed_order import FixedOrder
from tests.models import DDP, draw, mlp
from tests.pool import Pool

TRANSPORTS = ["shm", "torch"]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        x = self.a(x)
        y: torch.Tensor = x if skip else self.b(x)
        return y


def assert_equal_on_all(tensors: Any, size: int) -> None:
    rows: list[Any] = [None] * size
    dist.all_gather_object(rows, [tensor.tolist() for tensor in tensors])
    assert all(row == rows[0] for row in rows)


# ------------------------------------------------------------------------------------------- gradients set by hand


def by_hand(rank: int, size: int, transport: str) -> None:
    model = DDP(Skips(), transport=transport, timeout=10)
    a, b = model.module.a, model.module.b
    a.weight.grad = torch.full((4, 4), float(rank + 1))
    if rank == 0:
        b.bias.grad = torch.full((4,), 4.0)  # the others have none
    model.sync_gradients()
    assert a.weight.grad.flatten().tolist() == [1.5] * 16
    assert b.bias.grad.tolist() == [2.0] * 4
    assert a.bias.grad is None
    before = a.weight.grad.clone()
    model.sync_gradients()  # they are reduced now
    assert torch.equal(a.weight.grad, before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_that_were_set_by_hand_are_reduced(procs: Pool, transport: str) -> None:
    procs(2).run(by_hand, transport)


# ------------------------------------------------------------------------------------------------- two replicas


def two_replicas(rank: int, size: int, transport: str, multi_step: bool) -> None:
    """In step 1 rank 1 has no use for one of them; in step 2 it comes to them in the other order."""
    options: dict[str, Any] = {"transport": transport, "timeout": 10}
    if multi_step:
        options["reduction"] = FixedOrder()
    a, b = (DDP(nn.Linear(4, 1), **options) for _ in range(2))
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for step in range(6):
        x = torch.full((1, 4), float(rank + 1))
        first, second = (b, a) if rank == 0 or step % 3 != 2 else (a, b)
        one, two = first(x).sum(), second(x).sum()
        (one + two if rank == 0 or step % 3 != 1 else one).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all([*a.parameters(), *b.parameters()], size)


@pytest.mark.parametrize("multi_step", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_replicas_in_one_backward_in_any_order(procs: Pool, transport: str, multi_step: bool) -> None:
    procs(2).run(two_replicas, transport, multi_step)


# ------------------------------------------------------------------------------------------------------- threads


def backward_of(loss: torch.Tensor, told: list[Exception]) -> None:
    try:
        loss.backward()
    except Exception as error:  # noqa: BLE001
        told.append(error)


def two_threads(rank: int, size: int) -> list[str]:
    """Until it has happened: two backwards of one replica at once. Returns what this rank was told."""
    model = DDP(mlp(6, 64, 64, 64, 3), timeout=10)
    for step in range(200):
        losses = [model(draw(10 * step + rank + i, 64, 6)).square().mean() for i in range(2)]
        told: list[Exception] = []
        threads = [threading.Thread(target=backward_of, args=(loss, told)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if told:
            assert all(isinstance(error, IllegalMove | BackwardAborted) for error in told), told
            model(draw(0, 4, 6)).sum().backward()  # and it goes on
            return [str(error) for error in told]
        model.zero_grad()
    return []


@pytest.mark.timeout(120)
def test_two_threads_in_one_backward_are_an_error_on_every_rank(procs: Pool) -> None:
    for told in procs(2).run(two_threads, deadline_s=100):
        assert told, "they never met"
        assert all("thread" in text for text in told)


# ------------------------------------------------------------------------------------------------------- copies


def trained_copy(rank: int, size: int, transport: str) -> None:
    model = DDP(Skips(), transport=transport, timeout=10)
    average = copy.deepcopy(model) if rank == 0 else None  # one rank's own, for evaluation
    if average is not None:
        with torch.no_grad():
            average(torch.ones(2, 4), False)
    twin = copy.deepcopy(model)
    for _ in range(3):
        x = torch.full((2, 4), float(rank + 1))
        (model(x, rank == 1).mean() + twin(x, rank == 1).mean()).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        model.zero_grad()
        twin.zero_grad()
    assert_equal_on_all(twin.parameters(), size)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_copy_is_trained_apart_from_its_original(procs: Pool, transport: str) -> None:
    procs(2).run(trained_copy, transport)


# ------------------------------------------------------------------------------------------------- other groups


def moved(rank: int, size: int) -> str:
    model = DDP(nn.Linear(3, 2), agreement=paceline.Agreement(not_finite="skip"), timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    group = dist.new_group([0, 1])
    if rank == 2:
        return ""
    model._update_process_group(group)
    x = torch.ones(4, 3)
    x[0, 0] = float("nan") if rank == 1 else 1.0
    model(x).sum().backward()
    optimizer.step()
    assert model.module.weight.isfinite().all()
    optimizer.zero_grad()
    if rank == 1:
        model.module.weight.data[0, 0] += 1
    for _ in range(70):
        try:
            model(torch.ones(4, 3)).sum().backward()
        except paceline.errors.ReplicaDrift as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return "no drift was found"


def test_agreement_goes_along_to_another_group(procs: Pool) -> None:
    first, second, _ = procs(3).run(moved)
    assert first == second
    assert "weight" in first
    assert "rank 1" in first


def moves(rank: int, size: int) -> None:
    model = DDP(nn.Linear(3, 2), timeout=10)
    groups = [dist.new_group([0, 1]) for _ in range(8)]
    held: list[tuple[int, int]] = []
    for group in groups:
        model._update_process_group(group)
        model(torch.ones(4, 3)).sum().backward()
        gc.collect()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))  # noqa: PTH208
    # torch's own groups are connected when they are used, and nobody uses these.
    assert held[-1][0] <= held[2][0] + 1, held
    assert held[-1][1] <= held[2][1] + 1, held


def test_nothing_of_a_group_that_was_left_stays(procs: Pool) -> None:
    procs(2).run(moves)


# ------------------------------------------------------------------------------- collectives of the user's, beside


def saves_meanwhile(rank: int, size: int, transport: str) -> None:
    model = DDP(mlp(6, 16, 3), transport=transport, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    saving: Any = None
    for step in range(30):
        model(draw(10 * step + rank, 4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(model.module.state_dict(), checkpoint_id=f"{folder[0]}/{step}")
    saving.result()
    assert_equal_on_all(model.parameters(), size)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_save_of_torch_runs_beside_training(procs: Pool, transport: str) -> None:
    procs(2).run(saves_meanwhile, transport, deadline_s=50)


# ------------------------------------------------------------------------------------------------- hooks of the user's


def double(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def doubling(rank: int, size: int) -> None:
    """Hooks that come in the middle of a step, on every parameter, and change the gradient."""
    model = DDP(mlp(6, 8, 3), timeout=10)
    plain = mlp(6, 8, 3)
    plain.load_state_dict(model.module.state_dict())
    for step in range(4):
        loss = model(draw(10 * step + rank, 4, 6)).square().mean()
        if step == 1:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(double)
        loss.backward()
        for other in range(size):
            (plain(draw(10 * step + other, 4, 6)).square().mean() * (1 if step < 1 else 2) / size).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        model.zero_grad()
        plain.zero_grad()


def test_hooks_that_come_in_the_middle_of_a_step_change_what_is_reduced(procs: Pool) -> None:
    procs(2).run(doubling)
