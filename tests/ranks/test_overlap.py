"""Buckets fly while backward computes: read from the stamps, forced by a gate in the backward, not by sleeps."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.trace import Moment, Stamp
from tests.models import DDP, Branches, draw, mlp

ONE_EACH = 1e-6  # MiB: a bucket per parameter
LIFE = [Moment.READY, Moment.LAUNCHED, Moment.WAIT_ENTERED, Moment.COMPLETED, Moment.WAIT_LEFT]


class Gate(torch.autograd.Function):
    """Passes through; its backward waits until every rank's backward has come here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, barrier: threading.Barrier) -> torch.Tensor:
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.barrier.wait(20)
        return grad, None


class Gated(nn.Module):
    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.early, self.late = mlp(3, 3), mlp(3, 3, 3)
        self.barrier = barrier

    def forward(self, x: torch.Tensor) -> Any:
        gated: Any = Gate.apply(self.early(x), self.barrier)  # type: ignore[no-untyped-call]
        return self.late(gated)


def stamps(model: Any, backward: int) -> list[Stamp]:
    return [stamp for stamp in model.trace.stamps() if stamp.backward == backward]


def when(found: list[Stamp], moment: Moment, bucket: int = -1) -> int:
    (ns,) = [stamp.ns for stamp in found if (stamp.moment, stamp.bucket) == (moment, bucket)]
    return ns


@pytest.mark.parametrize("size", [2, 3])
def test_early_buckets_are_reduced_before_backward_ends_from_the_first_step(size: int) -> None:
    barrier = threading.Barrier(size)

    def body(transport: Transport) -> None:
        model = DDP(Gated(barrier), transport=transport, bucket_cap_mb=ONE_EACH)
        for backward in (1, 2, 3):
            model(draw(transport.rank, 2, 3)).sum().backward()
            found = stamps(model, backward)
            for bucket in range(4):  # those of the layers above the gate
                assert when(found, Moment.LAUNCHED, bucket) < when(found, Moment.BACKWARD_END)
                assert when(found, Moment.COMPLETED, bucket) < when(found, Moment.BACKWARD_END)

    run(body, size)


def test_the_moments_of_a_bucket_come_in_their_order() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 3, 3), transport=transport, bucket_cap_mb=ONE_EACH)
        for backward in (1, 2):
            model(draw(transport.rank, 2, 3)).sum().backward()
            found = stamps(model, backward)
            assert when(found, Moment.BACKWARD_BEGIN) <= when(found, Moment.READY, 0)
            for bucket in range(4):
                times = [when(found, moment, bucket) for moment in LIFE if moment is not Moment.COMPLETED]
                assert times == sorted(times)
            launched = [stamp.bucket for stamp in found if stamp.moment is Moment.LAUNCHED]
            assert launched == [0, 1, 2, 3]

    run(body, 2)


def test_nothing_flies_before_the_backward_in_the_explicit_form() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 3, 3), transport=transport, overlap=False)
        model(draw(transport.rank, 2, 3)).sum().backward()
        assert not [stamp for stamp in model.trace.stamps() if stamp.moment is Moment.LAUNCHED]
        model.sync_gradients()
        assert [stamp for stamp in model.trace.stamps() if stamp.moment is Moment.LAUNCHED]

    run(body, 2)


def test_forward_is_stamped() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 3), transport=transport)
        model(draw(0, 2, 3))
        assert [stamp.moment for stamp in model.trace.stamps()] == [Moment.FORWARD_BEGIN, Moment.FORWARD_END]

    run(body, 1)


@pytest.mark.parametrize("uses", ["tab", "t"], ids=["all used", "some unused"])
def test_every_bucket_has_every_moment_in_every_backward(uses: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=ONE_EACH)
        for backward in (1, 2):
            model(draw(transport.rank, 2, 3), uses).sum().backward()
            for moment in LIFE:
                found = [stamp.bucket for stamp in stamps(model, backward) if stamp.moment is moment]
                assert sorted(found) == list(range(6)), moment

    run(body, 2)


class Many(nn.Module):
    """A parameter of one number per bucket."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat(list(self.numbers)).sum()


def test_thousands_of_buckets_are_traced_whole() -> None:
    buckets = 1700

    def body(transport: Transport) -> None:
        model = DDP(Many(buckets), transport=transport, bucket_cap_mb=ONE_EACH)
        for backward in (1, 2):
            model(torch.ones(1)).sum().backward()
            model.zero_grad()
            found = [stamp.moment for stamp in stamps(model, backward)]
            assert found.count(Moment.LAUNCHED) == found.count(Moment.WAIT_LEFT) == buckets
        model(torch.ones(1))
        times = model._get_ddp_logging_data()
        assert times["forward_compute_time"] > 0
        assert times["backward_compute_time"] > 0

    run(body, 2)
