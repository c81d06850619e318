"""Buckets are cut from what the first backwards have shown, by agreement."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bucket_plan import Plan, plan_boundaries
from paceline.collectives import LocalTransport, Transport, run
from paceline.collectives.protocols import Traits
from paceline.collectives.reduction import Mean
from paceline.collectives.threads import ThreadTransport
from paceline.errors import SharedMemoryFull
from paceline.reducer import planning
from paceline.reducer.planning import PLAN_AT, PROBED_BYTES, STOP_AT
from tests.models import DDP, assert_close, draw, grads, mean_grads, mlp


def net() -> nn.Module:
    torch.manual_seed(3)
    return mlp(3, 16, 16, 16, 2)


def groups_of(model: DDP) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(slot.param for slot in bucket.slots) for bucket in model.layout.buckets)


def loss_at(step: int, module: nn.Module, rank: int) -> torch.Tensor:
    loss: torch.Tensor = module(draw(10 * step + rank, 4, 3)).sum()
    return loss


def train(model: DDP, rank: int, steps: int) -> None:
    for step in range(steps):
        model.zero_grad()
        model(draw(10 * step + rank, 4, 3)).sum().backward()


def test_all_ranks_move_to_the_plan_of_rank_0() -> None:
    def body(transport: Transport) -> tuple[tuple[int, ...], ...]:
        model = DDP(net(), transport=transport)
        train(model, transport.rank, PLAN_AT - 1)
        assert model.bucket_plan is None
        train(model, transport.rank, 2)
        plan = model.bucket_plan
        assert isinstance(plan, Plan)
        assert groups_of(model) == plan.groups
        assert plan.predicted_exposed_s >= 0
        return plan.groups

    plans = run(body, 3)
    assert len(set(plans)) == 1


def test_gradients_are_the_mean_before_and_after_the_plan_is_taken_up() -> None:
    def body(transport: Transport) -> None:
        model, plain = DDP(net(), transport=transport), net()
        for step in range(PLAN_AT + 2):
            model.zero_grad()
            model(draw(10 * step + transport.rank, 4, 3)).sum().backward()
            assert_close(grads(model.module), mean_grads(plain, partial(loss_at, step), transport.size))

    run(body, 2)


def test_gradients_that_were_accumulated_move_along() -> None:
    def body(transport: Transport) -> None:
        model, plain = DDP(net(), transport=transport), net()
        train(model, transport.rank, PLAN_AT)
        model.zero_grad()
        with model.no_sync():
            model(draw(transport.rank, 4, 3)).sum().backward()
        model(draw(transport.rank, 4, 3)).sum().backward()
        twice = mean_grads(plain, lambda module, rank: 2 * module(draw(rank, 4, 3)).sum(), transport.size)
        assert_close(grads(model.module), twice)

    run(body, 2)


def test_sizes_that_were_asked_for_rule() -> None:
    def body(transport: Transport) -> None:
        asked = [
            DDP(net(), transport=transport, bucket_cap_mb=1e-6),
            DDP(net(), transport=transport, bucket_cap_mb_list=[1e-6]),
            DDP(net(), transport=transport, bucket_plan="fixed"),
        ]
        for model in asked:
            train(model, transport.rank, PLAN_AT + 1)
            assert model.bucket_plan is None
            assert model._core.planning.order_learned
        assert [len(model.layout.buckets) for model in asked] == [8, 8, 1]

    run(body, 2)


def test_a_reduction_that_may_keep_state_by_bucket_keeps_its_buckets() -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, reduction=Mean(multi_step=True))
        train(model, transport.rank, PLAN_AT + 1)
        assert model.bucket_plan is None

    run(body, 2)


def test_a_world_of_one_plans_nothing() -> None:
    model = DDP(net(), transport=LocalTransport())
    train(model, 0, PLAN_AT + 1)
    assert model.bucket_plan is None


def test_rank_0_alone_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def noted(*args: Any) -> Plan:
        searched.append(threading.current_thread().name)
        return plan_boundaries(*args)

    monkeypatch.setattr(planning, "plan_boundaries", noted)

    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport)
        train(model, transport.rank, PLAN_AT)
        assert isinstance(model.bucket_plan, Plan)

    run(body, 3)
    assert searched == ["rank 0"]


@pytest.mark.parametrize("error", [SharedMemoryFull("no room"), torch.OutOfMemoryError("no room")], ids=repr)
@pytest.mark.parametrize("inline", [False, True], ids=["beside", "inline"])
@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_without_memory_for_the_probe_leaves_all_without_a_plan(
    poor: int, inline: bool, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def allocate(self: ThreadTransport, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if numel * dtype.itemsize == max(PROBED_BYTES):
            asked.append(self.rank)
            if self.rank == poor:
                raise error
        return torch.zeros(numel, dtype=dtype, device=device)

    monkeypatch.setattr(ThreadTransport, "allocate", allocate)
    traits = Traits(progress_on_caller=inline, tree_sum=True, all_to_all=True)
    monkeypatch.setattr(ThreadTransport, "traits", lambda *_: traits)

    def body(transport: Transport) -> tuple[tuple[int, ...], ...]:
        model, plain = DDP(net(), transport=transport, timeout=20), net()
        for step in range(PLAN_AT + 2):
            model.zero_grad()
            model(draw(10 * step + transport.rank, 4, 3)).sum().backward()
            assert_close(grads(model.module), mean_grads(plain, partial(loss_at, step), transport.size))
        assert model.bucket_plan is None
        assert model._core.planning.order_learned
        return groups_of(model)

    assert len(set(run(body, 2))) == 1
    assert sorted(asked) == [0, 1], "it is not tried again in every step"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"rank {poor} could not allocate 4,194,304 bytes") and line.endswith("no room")


@pytest.mark.parametrize("inline", [False, True], ids=["beside", "inline"])
def test_a_converted_module_is_planned_anew(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = Traits(progress_on_caller=inline, tree_sum=True, all_to_all=True)
    monkeypatch.setattr(ThreadTransport, "traits", lambda *_: traits)

    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport)
        train(model, transport.rank, PLAN_AT + 2)
        narrow = model.bucket_plan
        model.module.double()
        for step in range(PLAN_AT):
            assert step == 0 or inline or model.bucket_plan is None, "the first backwards are slow again"
            model.zero_grad()
            model(draw(step, 4, 3).double()).sum().backward()
        wide = model.bucket_plan
        assert isinstance(narrow, Plan) and isinstance(wide, Plan)
        assert sum(wide.bucket_bytes) == 2 * sum(narrow.bucket_bytes)
        model.zero_grad()
        model(draw(9 + transport.rank, 4, 3).double()).sum().backward()
        assert groups_of(model) == wide.groups
        expected = mean_grads(net().double(), lambda module, rank: module(draw(9 + rank, 4, 3).double()).sum(), 2)
        assert_close(grads(model.module), expected)

    run(body, 2)


def test_replicas_that_always_share_a_backward_stop_measuring() -> None:
    def body(transport: Transport) -> None:
        one, other = DDP(net(), transport=transport), DDP(net(), transport=transport)
        for step in range(STOP_AT + 2):
            x = draw(10 * step + transport.rank, 4, 3)
            (one(x).sum() + other(x).sum()).backward()
        assert one.bucket_plan is None, "the other one waits for its sums at the same time"
        assert not (one._core.planning.measures or other._core.planning.measures)

    run(body, 2)
