"""A backward that fails on one rank: the others are told, and the next steps are right."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import BackwardAborted, PeerAbsent, PeerLost
from paceline.strategies.cast import Wire
from tests.models import DDP, Grads, assert_same_bits, draw, grads, mean_grads, mlp

ONE_EACH = 1e-6  # MiB: a bucket per parameter


class Broken(Exception):
    """What goes wrong in these tests."""


class Fuse(torch.autograd.Function):
    """Passes through; its backward raises when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blows: bool) -> torch.Tensor:
        ctx.blows = blows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.blows:
            raise Broken("a backward went wrong")
        return grad, None


def fuse(x: torch.Tensor, blows: bool) -> torch.Tensor:
    out: torch.Tensor = Fuse.apply(x, blows)  # type: ignore[no-untyped-call]
    return out


class Fused(nn.Module):
    """Three layers with a fuse below layer `place`: 3 is above all of them, 0 below."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = mlp(3, 3, 3, 3)
        self.place = place

    def forward(self, x: torch.Tensor, *, blows: bool = False) -> torch.Tensor:
        for index, layer in enumerate([self.layers[0:2], self.layers[2:4], self.layers[4]]):
            if index == self.place:
                x = fuse(x.requires_grad_(), blows)
            x = layer(x)
        return fuse(x, blows) if self.place == 3 else x


def loss(model: Any, rank: int, *, blows: bool = False) -> torch.Tensor:
    out: torch.Tensor = model(draw(rank, 2, 3), blows=blows).square().sum()
    return out


PLACES = {"after the last gradient": 0, "after some gradients": 1, "after one layer": 2, "before any gradient": 3}


@pytest.mark.parametrize("cap", [None, ONE_EACH], ids=["one bucket", "a bucket each"])
@pytest.mark.parametrize("bad", [0, 1], ids=["rank 0 fails", "rank 1 fails"])
@pytest.mark.parametrize("where", PLACES)
def test_the_others_are_told_and_the_next_step_is_right(where: str, bad: int, cap: float | None) -> None:
    def body(transport: Transport) -> list[Grads]:
        model = DDP(Fused(PLACES[where]), transport=transport, bucket_cap_mb=cap, timeout=5)
        results = []
        for step in range(5):
            model.zero_grad()
            if step not in (0, 2):
                loss(model, transport.rank).backward()
                results.append(grads(model))
                continue
            out = loss(model, transport.rank, blows=transport.rank == bad)
            with pytest.raises(Broken if transport.rank == bad else BackwardAborted) as caught:
                out.backward()
            if transport.rank != bad:
                assert isinstance(caught.value, BackwardAborted)
                assert caught.value.ranks == (bad,)
                assert f"ended with an exception on rank {bad}" in str(caught.value)
                assert "skip the step or stop on all ranks" in str(caught.value)
        return results

    expected = mean_grads(Fused(PLACES[where]), loss, 3)
    for results in run(body, 3):
        assert len(results) == 3
        for got in results:
            assert_same_bits(got, expected)


def test_two_ranks_that_fail_are_both_named() -> None:
    def body(transport: Transport) -> tuple[int, ...]:
        model = DDP(Fused(1), transport=transport)
        try:
            loss(model, transport.rank, blows=transport.rank > 0).backward()
        except Broken:
            loss(model, transport.rank)
        except BackwardAborted as error:
            return error.ranks
        return ()

    assert run(body, 3) == [(1, 2), (), ()]


def test_all_ranks_that_fail_together_go_on_together() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Fused(1), transport=transport, bucket_cap_mb=ONE_EACH)
        with pytest.raises(Broken):
            loss(model, transport.rank, blows=True).backward()
        model.zero_grad()
        loss(model, transport.rank).backward()
        return grads(model)

    expected = mean_grads(Fused(1), loss, 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


def test_a_failure_while_accumulating_is_the_ranks_own_matter() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Fused(1), transport=transport)
        if transport.rank == 1:
            with pytest.raises(Broken), model.no_sync():
                loss(model, 9, blows=True).backward()
            model.zero_grad()
        loss(model, transport.rank).backward()
        return grads(model)

    expected = mean_grads(Fused(1), loss, 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


def test_a_failure_of_a_weighted_micro_leaves_nothing_behind() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Fused(1), transport=transport)
        if transport.rank == 1:
            with pytest.raises(Broken), model.no_sync(), model.weight(3):
                loss(model, 9, blows=True).backward()
            model.zero_grad()
        with model.weight(2):
            loss(model, transport.rank).backward()
        return grads(model)

    expected = mean_grads(Fused(1), loss, 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


def test_a_failed_rank_that_ends_is_named_to_the_others() -> None:
    seen: list[tuple[int, ...]] = []

    def body(transport: Transport) -> None:
        model = DDP(Fused(1), transport=transport)
        try:
            loss(model, transport.rank, blows=transport.rank == 1).backward()
        except PeerLost as error:
            seen.append(error.ranks)
            raise

    with pytest.raises(Broken):
        run(body, 3)
    assert seen == [(1,), (1,)]


def test_a_rank_that_does_not_come_is_missed_at_the_timeout() -> None:
    missed = threading.Event()

    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 3, 3), transport=transport, timeout=0.3, bucket_cap_mb=ONE_EACH)
        if transport.rank == 1:
            assert missed.wait(20)
            return
        with pytest.raises(
            PeerAbsent, match=r"bucket 0 of backward 1 for rank 1, which exceeds timeout=0.3 s"
        ) as caught:
            model(draw(0, 2, 3)).sum().backward()
        assert caught.value.ranks == (1,)
        missed.set()

    run(body, 2)


def test_a_module_called_directly_recovers_too() -> None:
    def body(transport: Transport) -> list[Grads]:
        model = DDP(Fused(1), transport=transport, bucket_cap_mb=ONE_EACH, timeout=5)
        results = []
        for step in range(4):
            model.zero_grad()
            blows = step == 1 and transport.rank == 1
            try:
                loss(model.module, transport.rank, blows=blows).backward()
                results.append(grads(model))
            except (Broken, BackwardAborted):
                assert step == 1
        return results

    expected = mean_grads(Fused(1), loss, 2)
    for results in run(body, 2):
        assert len(results) == 3
        for got in results:
            assert_same_bits(got, expected)


def test_a_hook_of_the_user_that_raises_is_an_ordinary_failure() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 3, 3), transport=transport, bucket_cap_mb=ONE_EACH)

        def boom(_: torch.Tensor) -> None:
            raise Broken

        handle = model.module[0].weight.register_post_accumulate_grad_hook(boom)
        with pytest.raises(Broken):
            model(draw(0, 2, 3)).sum().backward()
        handle.remove()
        model.zero_grad()
        model(draw(transport.rank, 2, 3)).sum().backward()
        return grads(model)

    expected = mean_grads(mlp(3, 3, 3), lambda m, rank: m(draw(rank, 2, 3)).sum(), 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


def test_the_others_are_told_whatever_goes_over_the_wire() -> None:
    def body(transport: Transport) -> str:
        model = DDP(Fused(1), transport=transport, bucket_cap_mb=ONE_EACH, reduction=Wire(torch.bfloat16), timeout=5)
        try:
            loss(model, transport.rank, blows=transport.rank == 1).backward()
        except (Broken, BackwardAborted) as error:
            name = type(error).__name__
        model.zero_grad()
        loss(model, transport.rank).backward()
        return name

    assert run(body, 2) == ["BackwardAborted", "Broken"]
