"""Reductions over real processes: equal on all ranks, and where the order is fixed, equal to those of threads."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import Transport
from paceline.collectives.reduction_protocol import Reduction
from paceline.collectives.threads import run
from paceline.errors import UsageError
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.names import NAMES, by_name
from paceline.strategies.power_sgd import PowerSGD
from paceline.strategies.top_k import TopK
from tests.models import DDP, Grads, assert_close, assert_same_bits, draw, grads, mlp, packed, unpacked, values
from tests.pool import Pool

TRANSPORTS = ["torch", "shm"]


def reduction_of(name: str) -> Reduction:
    if name == "powersgd":
        return PowerSGD(rank=2, start_step=2)
    return TopK(0.1) if name == "topk" else by_name(name)


def train(model: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        model(draw(100 * step + rank, 4, 16)).square().mean().backward()
        optimizer.step()


def trained(rank: int, size: int, name: str, transport: str) -> bytes:
    model = DDP(mlp(16, 32, 16, 4), reduction=reduction_of(name), transport=transport, bucket_cap_mb=1e-3)
    train(model, rank)
    return packed(values(model))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_reduction_trains_alike_on_real_ranks_and_threads(procs: Pool, name: str, transport: str) -> None:
    results = [unpacked(result) for result in procs(2).run(trained, name, transport)]
    assert_same_bits(results[0], results[1])

    def body(transport: Transport) -> Grads:
        model = DDP(mlp(16, 32, 16, 4), reduction=reduction_of(name), transport=transport, bucket_cap_mb=1e-3)
        train(model, transport.rank)
        return dict(values(model))

    on_threads = run(body, 2)[0]
    if name == "powersgd":  # the arithmetic of matrices may differ between a process with one thread and this one
        assert_close(results[0], on_threads, rtol=1e-2, atol=1e-3)
    else:
        assert_same_bits(results[0], on_threads)


def rough_grads(transport_rank: int, **settings: Any) -> Grads:
    """Gradients of very different sizes, so that every order of additions has its own bits."""
    model = DDP(mlp(5, 7, 3), reduction=by_name("fixed-order"), **settings)
    factor = 10.0 ** (transport_rank - 1)
    (model(draw(transport_rank, 3, 5)).sum() * factor).backward()
    return grads(model)


def ordered(rank: int, size: int, cap: float, transport: str) -> bytes:
    return packed(rough_grads(rank, bucket_cap_mb=cap, transport=transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fixed_order_has_the_bits_of_threads_whatever_the_buckets(procs: Pool, transport: str) -> None:
    def body(transport: Transport) -> Grads:
        return rough_grads(transport.rank, transport=transport)

    expected = run(body, 3)[0]
    for cap in (1e-6, 25):
        for result in procs(3).run(ordered, cap, transport):
            assert_same_bits(unpacked(result), expected)


class PythonGroup(dist.ProcessGroup):
    """A group written in Python, over another one. It has what a replica needs, and no exchange."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner

    def name(self) -> str:
        return "python"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._inner.allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._inner.broadcast(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._inner.allgather(outputs, inputs, options)


def over_a_group_without_exchange(rank: int, size: int) -> str:
    assert dist.group.WORLD is not None
    group = PythonGroup(dist.group.WORLD)
    with pytest.raises(UsageError) as refused:
        DDP(mlp(5, 7, 3), reduction=FixedOrder(), process_group=group)
    model = DDP(mlp(5, 7, 3), process_group=group)
    model(draw(rank, 3, 5)).sum().backward()
    return str(refused.value)


def test_a_fixed_order_that_a_group_cannot_have_is_refused_when_the_model_is_wrapped(procs: Pool) -> None:
    for message in procs(2).run(over_a_group_without_exchange):
        assert message.startswith("FixedOrder sends every rank its slice of a bucket")


def wait_for_a_late_rank(rank: int, size: int) -> float:
    assert dist.group.WORLD is not None
    if rank == 1:
        time.sleep(0.5)
    model = DDP(mlp(5, 7, 3), process_group=PythonGroup(dist.group.WORLD))
    if rank == 1:
        time.sleep(0.5)
    model(torch.full((2, 5), float(rank + 1))).sum().backward()
    return float(sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None))


def test_a_group_written_in_python_is_waited_for(procs: Pool) -> None:
    first, second = procs(2).run(wait_for_a_late_rank)
    assert first == second > 0


def move_to_a_larger_group(rank: int, size: int, name: str) -> bytes:
    """Ranks 0 and 1 have trained together for longer than rank 2 has alone."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    model = DDP(mlp(16, 32, 16, 4), reduction=reduction_of(name), process_group=single if rank == 2 else pair)
    for step in range(1 if rank == 2 else 5):
        model.zero_grad()
        model(draw(100 * step + rank, 4, 16)).square().mean().backward()
    model._update_process_group(dist.group.WORLD)
    for step in range(5):
        model.zero_grad()
        model(draw(100 * step + rank, 4, 16)).square().mean().backward()
    return packed(grads(model))


def take_a_hook_along(rank: int, size: int) -> int:
    """A replica that was alone until now keeps its user's hook."""
    calls: list[int] = []

    def double(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * 2)
        return done

    alone = [dist.new_group([one]) for one in range(size)][rank]
    model = DDP(mlp(16, 4), process_group=alone)
    model.register_comm_hook(None, double)
    model._update_process_group(dist.group.WORLD)
    model(draw(rank, 4, 16)).square().mean().backward()
    return len(calls)


def test_a_communication_hook_holds_in_another_group(procs: Pool) -> None:
    assert min(procs(2).run(take_a_hook_along)) > 0


def in_a_new_replica(rank: int, size: int, name: str) -> bytes:
    model = DDP(mlp(16, 32, 16, 4), reduction=reduction_of(name))
    for step in range(5):
        model.zero_grad()
        model(draw(100 * step + rank, 4, 16)).square().mean().backward()
    return packed(grads(model))


@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_what_is_known_from_other_ranks_is_forgotten_in_another_group(procs: Pool, name: str) -> None:
    moved = [unpacked(result) for result in procs(3).run(move_to_a_larger_group, name)]
    fresh = [unpacked(result) for result in procs(3).run(in_a_new_replica, name)]
    for one, other in zip(moved, fresh, strict=True):
        assert_same_bits(one, moved[0])
        assert_same_bits(one, other)
