"""A replica outlives its process group: stopped at different places of a step, ranks go on together in the next one."""

import gc
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline.errors import PeerAbsent
from paceline.replica.membership import outlive_group
from tests.models import draw, mlp
from tests.pool import Pool

LANES = 2


def net(lanes: int | None) -> torch.nn.Module:
    module = mlp(16, 32, 16, 4)
    if lanes is not None:  # outside of lanes buffers are sent with every forward
        module.append(torch.nn.BatchNorm1d(4))
    return module


def one_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int) -> None:
    rank = dist.get_rank()
    optimizer.zero_grad()
    if model._lane_count is None:
        model(draw(100 * number + rank, 4, 16)).square().mean().backward()
    else:
        microbatches = [draw(100 * number + lane, 4, 16) for lane in model.own_lanes]
        for microbatch in model.lanes(microbatches, number):
            model(microbatch).square().mean().backward()
    optimizer.step()


def form_again(rank: int, size: int, folder: str, number: int) -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{number}", size), rank=rank, world_size=size)
    return outlive_group()


def stopped_apart(rank: int, size: int, folder: str, transport: str, lanes: int | None) -> list[list[float]]:
    """Rank 0 waits in a reduction that rank 1 never comes to, and after the next one rank 1 makes an update alone."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    gc.collect()  # replicas of tests before this one, in the same process
    torch.manual_seed(3)
    store = dist.FileStore(f"{folder}/0", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = DistributedDataParallel(net(lanes), transport=transport, lanes=lanes, timeout=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        one_step(model, optimizer, number)
    if rank == 0:
        with pytest.raises(PeerAbsent):
            one_step(model, optimizer, 3)
    assert form_again(rank, size, folder, 1) == 1
    one_step(model, optimizer, 3)
    if rank == 1:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        for buffer in model.buffers():
            buffer.add_(1)
    assert form_again(rank, size, folder, 2) == 1
    for number in range(4, 8):
        one_step(model, optimizer, number)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    dist.destroy_process_group()
    return [tensor.flatten().tolist() for tensor in [*model.parameters(), *model.buffers(), *moments]]


@pytest.mark.parametrize(("transport", "lanes"), [("shm", None), ("torch", None), ("auto", LANES)])
def test_ranks_that_were_stopped_apart_go_on_together(
    procs: Pool, tmp_path: Path, transport: str, lanes: int | None
) -> None:
    """Rank 0 is believed: its interrupted step is made again, and what rank 1 did alone is undone."""
    first, second = procs(2).run(stopped_apart, str(tmp_path), transport, lanes, group=False)
    assert first == second
    straight, _ = procs(2).run(never_stopped, lanes)
    assert first == straight


def never_stopped(rank: int, size: int, lanes: int | None) -> list[list[float]]:
    torch.manual_seed(3)
    model = DistributedDataParallel(net(lanes), lanes=lanes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(8):
        one_step(model, optimizer, number)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [tensor.flatten().tolist() for tensor in [*model.parameters(), *model.buffers(), *moments]]


class Interrupted(torch.optim.SGD):
    """Stops in the middle of an update when it is told to."""

    stops = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for number, param in enumerate(self.param_groups[0]["params"]):
            if self.stops and number == 2:
                raise KeyboardInterrupt
            param.data.add_(param.grad, alpha=-0.1)


def stopped_around_an_update(rank: int, size: int, folder: str) -> tuple[list[float], list[float]]:
    """Rank 0 has not made the third update, rank 1 has, rank 2 has made half of it. Returns what rank 1 had, and what
    this rank has after the ranks have met again."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    gc.collect()
    torch.manual_seed(3)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/0", size), rank=rank, world_size=size)
    model = DistributedDataParallel(mlp(16, 32, 4), timeout=5.0)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        model(draw(100 * number + rank, 4, 16)).square().mean().backward()
        optimizer.stops = number == 2 and rank == 2
        if number < 2 or rank == 1:
            optimizer.step()
        elif rank == 2:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
    wanted = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.broadcast(wanted, 1)
    assert form_again(rank, size, folder, 1) == 1
    model(draw(0, 4, 16))
    dist.destroy_process_group()
    return wanted.tolist(), torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_a_state_that_some_rank_has_had_is_taken_whole(procs: Pool, tmp_path: Path) -> None:
    for wanted, found in procs(3).run(stopped_around_an_update, str(tmp_path), group=False):
        assert found == wanted


def left_with_a_part(rank: int, size: int, folder: str) -> None:
    gc.collect()  # replicas of tests before this one, in the same process
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/0", size), rank=rank, world_size=size)
    part = dist.new_group([0, 1])
    of_all = DistributedDataParallel(mlp(4, 4), transport="torch", timeout=20)
    of_part = (
        DistributedDataParallel(mlp(4, 4), process_group=part, transport="torch", timeout=20) if rank < 2 else None
    )
    assert form_again(rank, size, folder, 1) == 1, "the ranks of the default group are not those of the other one"
    of_all(torch.ones(1, 4)).sum().backward()
    assert of_part is None or not of_part._group_is_gone
    dist.destroy_process_group()


def test_a_replica_of_some_ranks_does_not_move_to_all_of_them(procs: Pool, tmp_path: Path) -> None:
    procs(3).run(left_with_a_part, str(tmp_path), group=False)
