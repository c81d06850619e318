"""Checked collectives that do not belong together: swapped, missing, extra. With real processes on gloo."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.collectives.torch_store import store_of
from paceline.errors import CollectiveMismatch, PeerLost, UsageError
from tests.pool import Outcome, Pool

SECONDS = 15.0  # far below the minute after which unproven deadlocks end; the machine may be busy


def line_of(mark: str) -> str:
    """The place of the line of this file that ends with a mark, as errors name it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"procs/test_checked.py:{number}"


def store() -> dist.Store:
    assert dist.group.WORLD is not None
    found = store_of(dist.group.WORLD)
    assert found is not None
    return found


def messages(outcomes: list[Outcome], error: type[Exception] = CollectiveMismatch) -> list[str]:
    for outcome in outcomes:
        assert isinstance(outcome.error, error), outcome
        assert outcome.seconds < SECONDS
    return [str(outcome.error) for outcome in outcomes]


# -------------------------------------------------------------------------------------------------------- swapped


def swap(rank: int, size: int) -> None:
    few, many = torch.tensor([1.0]), torch.tensor([10.0])
    if rank == 0:
        paceline.all_reduce(few)  # few first
        paceline.all_reduce(many)
    else:
        paceline.all_reduce(many)  # many first
        paceline.all_reduce(few)


def test_two_sums_of_one_shape_in_different_order_are_an_error_that_names_both_lines(procs: Pool) -> None:
    for message in messages(procs(2).attempt(swap)):
        assert f"rank 0 called all_reduce(sum) of float32[1] at {line_of('few first')} in swap" in message
        assert f"rank 1 called all_reduce(sum) of float32[1] at {line_of('many first')} in swap" in message
        assert "nothing was sent" in message
        assert 'tag="..."' in message


def mean(values: torch.Tensor) -> torch.Tensor:
    return paceline.all_reduce(values, "mean")  # in the wrapper


def of_loss() -> torch.Tensor:
    return mean(torch.ones(1))  # of loss


def of_norm() -> torch.Tensor:
    return mean(torch.ones(1))  # of norm


def swap_wrapped(rank: int, size: int) -> None:
    for one in (of_loss, of_norm) if rank == 0 else (of_norm, of_loss):
        one()


def test_a_swap_inside_a_wrapper_is_seen_by_who_called_the_wrapper(procs: Pool) -> None:
    for message in messages(procs(2).attempt(swap_wrapped)):
        inner = f"called all_reduce(mean) of float32[1] at {line_of('in the wrapper')} in mean"
        assert f"rank 0 {inner}, called at {line_of('of loss')} in of_loss" in message
        assert f"rank 1 {inner}, called at {line_of('of norm')} in of_norm" in message


def meet_by_tag(rank: int, size: int) -> tuple[float, float, float]:
    if rank == 0:
        first = paceline.all_reduce(torch.tensor([1.0]), tag="loss")
        paceline.barrier(tag="epoch")
        parts = paceline.all_gather(torch.tensor([1.0]), tag="parts")
        sent = paceline.broadcast(torch.tensor([5.0]), tag="start")
    else:
        first = paceline.all_reduce(torch.tensor([2.0]), tag="loss")
        paceline.barrier(tag="epoch")
        parts = paceline.all_gather(torch.tensor([2.0]), tag="parts")
        sent = paceline.broadcast(torch.tensor([0.0]), tag="start")
    return first.item(), sum(part.item() for part in parts), sent.item()


def test_a_tag_joins_calls_on_different_lines(procs: Pool) -> None:
    assert procs(2).run(meet_by_tag) == [(3.0, 3.0, 5.0)] * 2


def differ_by_tag(rank: int, size: int) -> None:
    for tags in (("loss", "norm"), ("loss", None)):
        with pytest.raises(CollectiveMismatch) as caught:
            paceline.barrier(tag=tags[rank])
        told = "with tag='loss'" in str(caught.value), "with tag='norm'" in str(caught.value)
        assert told == (True, tags[1] is not None)
    with pytest.raises(UsageError, match="tag must be text"):
        paceline.barrier(tag=3)  # type: ignore[arg-type]
    paceline.barrier()


def test_different_tags_are_an_error(procs: Pool) -> None:
    procs(2).run(differ_by_tag)


# ------------------------------------------------------------------------------------------- missing, and one extra


def replica(transport: str) -> Any:
    net = torch.nn.Linear(4, 2)
    return paceline.DistributedDataParallel(net, transport=transport, bucket_plan="fixed")


def train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()  # backward
        model.zero_grad()


def miss_one(rank: int, size: int, transport: str) -> None:
    model = replica(transport)
    train(model, 2)
    if rank == 0:
        paceline.all_reduce(torch.ones(2))  # extra
    train(model, 1)


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_an_extra_collective_while_others_reduce_is_an_error_in_seconds(procs: Pool, transport: str) -> None:
    for message in messages(procs(2).attempt(miss_one, transport)):
        start = "rank 0 waits in the start of all_reduce(sum) of float32[2]"
        assert f"{start} at {line_of('extra')} in miss_one; rank 1 waits in " in message
        assert f" of backward 3 at {line_of('backward')} in train" in message


def miss_between_two(rank: int, size: int) -> None:
    paceline.barrier()
    if rank == 0:
        paceline.all_reduce(torch.ones(2))  # only here
    paceline.all_reduce(torch.ones(2))  # everywhere
    paceline.barrier()


def test_an_extra_collective_before_an_equal_one_is_an_error_at_once(procs: Pool) -> None:
    for message in messages(procs(2).attempt(miss_between_two)):
        assert f"rank 0 called all_reduce(sum) of float32[2] at {line_of('only here')}" in message
        assert f"rank 1 called all_reduce(sum) of float32[2] at {line_of('everywhere')}" in message


def two_replicas(rank: int, size: int) -> None:
    models = [replica("torch"), replica("torch")]
    for model in models:
        train(model, 1)
    for model in models if rank == 0 else reversed(models):
        train(model, 1)


def test_two_replicas_in_different_order_are_an_error_in_seconds(procs: Pool) -> None:
    for message in messages(procs(2).attempt(two_replicas)):
        assert "rank 0 waits in " in message and "rank 1 waits in " in message


def leave_early(rank: int, size: int, how: str) -> None:
    paceline.barrier()
    meeting = store()
    if rank == 1:
        if how == "exit":
            os._exit(0)
        paceline.shutdown()
        meeting.wait([f"failed/{other}" for other in (0, 2)])
        return
    try:
        paceline.all_reduce(torch.ones(2))  # alone
    finally:
        meeting.set(f"failed/{rank}", "")


@pytest.mark.parametrize("how", ["exit", "shutdown"])
def test_an_extra_collective_after_others_have_ended_is_an_error(procs: Pool, how: str) -> None:
    outcomes = procs(3).attempt(leave_early, how)
    for outcome in (outcomes[0], outcomes[2]):
        (message,) = messages([outcome], PeerLost)
        assert f") {'died' if how == 'exit' else 'left the group'} while rank {outcome.rank} waited " in message
        assert line_of("alone") in message


def be_slow(rank: int, size: int) -> float:
    model = replica("torch")
    train(model, 1)
    if rank == 1:
        time.sleep(5.0)  # an evaluation, say: in no collective
    return paceline.all_reduce(torch.ones(1)).item()


def test_a_slow_rank_is_no_error(procs: Pool) -> None:
    assert procs(2).run(be_slow) == [2.0, 2.0]
