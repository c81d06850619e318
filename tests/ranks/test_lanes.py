"""Lanes: the same bits in a world of any size. Ranks are threads here; tests/procs has real ones, with dropout."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import Agreement
from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import (
    BackwardAborted,
    CollectiveMismatch,
    PeerLost,
    UnreducedGradients,
    UnusedParameters,
    UsageError,
)
from tests.models import DDP, Branches, draw, mlp, seeded

State = dict[str, torch.Tensor]
# What a step does with one lane: (model, microbatch, step, lane).
Body = Callable[[Any, torch.Tensor, int, int], None]


def net() -> nn.Module:
    return seeded(
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3))
    )


def plain(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    model(x).square().mean().backward()


def microbatch(step: int, lane: int) -> torch.Tensor:
    return draw(1000 * step + lane, 4, 5)


def train(
    transport: Transport,
    lanes: int,
    body: Body = plain,
    *,
    make: Callable[[], nn.Module] = net,
    deal: Callable[[int, int], torch.Tensor] = microbatch,
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
    **arguments: Any,
) -> State:
    module = make() if dtype is torch.float32 else make().to(dtype)  # which would make complex buffers real
    model = DDP(module, transport=transport, lanes=lanes, seed=7, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        numbered = [(lane, deal(step, lane).to(dtype)) for lane in model.own_lanes]
        for lane, x in model.lanes(numbered, step):
            body(model, x, step, lane)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def check_same_bits(lanes: int, sizes: tuple[int, ...], *args: Any, **kwargs: Any) -> State:
    (alone,) = run(lambda transport: train(transport, lanes, *args, **kwargs), 1)
    for size in sizes:
        for got in run(lambda transport: train(transport, lanes, *args, **kwargs), size):
            for name, value in alone.items():
                assert torch.equal(got[name], value), (size, name, got[name] - value)
    return alone


@pytest.mark.parametrize(("lanes", "sizes"), [(3, (2, 3)), (6, (2, 4, 5)), (8, (2, 3, 4, 5, 8))])
def test_any_number_of_ranks_gives_the_same_bits(lanes: int, sizes: tuple[int, ...]) -> None:
    check_same_bits(lanes, sizes)


def test_it_is_the_mean_over_lanes() -> None:
    by_lanes = check_same_bits(4, (2,), make=lambda: mlp(5, 6, 3))
    module = mlp(5, 6, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(4):
        module(torch.cat([microbatch(step, lane) for lane in range(4)])).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in module.state_dict().items():
        assert torch.allclose(by_lanes[name], value, atol=1e-5)


def weighted(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    with model.weight(len(x) + 0.1 * lane):  # no whole numbers, so that adding them up in another order would show
        model(x).square().mean().backward()


def accumulated(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    first, *rest = x.split(2)
    for part in rest:
        with model.no_sync():
            model(part).square().mean().backward()
    model(first).square().mean().backward()


def sometimes(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    """Lanes that have nothing to say: some of them, and once all."""
    if step == 2 or (step + lane) % 3 == 0:
        model.skip_batch()
    else:
        plain(model, x, step, lane)


def of_branches(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    model(x[:, :3], "ta" if lane % 2 else "t").sum().backward()


def of_branches_or_skipped(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    """The last lane of every rank has nothing to say, and what no lane has used is left alone."""
    if lane % 2 == 0 and lane < 5:
        of_branches(model, x, step, lane)
    else:
        model.skip_batch()


def skips_short_ones(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    plain(model, x, step, lane) if len(x) else model.skip_batch()


def poisoned(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    plain(model, x * float("inf") if (step, lane) == (1, 4) else x, step, lane)


def experts(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    """Each lane uses other parameters than the lanes beside it."""
    model.module[lane % 3](x).sum().backward()


def by_hand(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    with model.no_sync():
        plain(model, x, step, lane)
    model.sync_gradients()


def weighted_or_skipped(model: Any, x: torch.Tensor, step: int, lane: int) -> None:
    """A lane may decide to skip after its first microbatch."""
    with model.weight(2.5 + lane), model.no_sync():
        plain(model, x, step, lane)
    if lane % 2 == 0:
        model.skip_batch()
    else:
        with model.weight(1.5):
            plain(model, x, step, lane)


BODIES: dict[str, tuple[Body, dict[str, Any]]] = {
    "weighted": (weighted, {"deal": lambda step, lane: draw(10 * step + lane, 2 + (step + lane) % 3, 5)}),
    "several microbatches in a lane": (accumulated, {}),
    "some lanes skip": (sometimes, {"make": lambda: mlp(5, 6, 3)}),
    "parameters of some lanes": (experts, {"make": lambda: nn.Sequential(*(mlp(5, 2, seed=n) for n in range(3)))}),
    "lanes closed by hand": (by_hand, {}),
    "weighted, then skipped": (weighted_or_skipped, {"make": lambda: mlp(5, 6, 3)}),
    "unused parameters": (of_branches, {"make": Branches}),
    "a bucket for each": (plain, {"bucket_cap_mb": 1e-6}),
    "fixed plan": (plain, {"bucket_plan": "fixed"}),
    "a static graph": (plain, {"static_graph": True}),
    "bfloat16": (plain, {"make": lambda: mlp(5, 6, 3), "dtype": torch.bfloat16}),
    "a step that is skipped": (poisoned, {"agreement": Agreement(not_finite="skip")}),
    "float64": (plain, {"dtype": torch.float64}),
    "skipped lanes of another size": (
        skips_short_ones,
        {"deal": lambda step, lane: draw(10 * step + lane, 0 if (step + lane) % 4 == 0 else 4, 5)},
    ),
    "another size in every step": (plain, {"deal": lambda step, lane: draw(10 * step + lane, 3 + step, 5)}),
    "unused parameters, and skipped lanes": (of_branches_or_skipped, {"make": Branches}),
    "parameters of some lanes, and all are wanted": (
        experts,
        {"make": lambda: nn.Sequential(*(mlp(5, 2, seed=n) for n in range(3))), "unused": "error"},
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_whatever_a_lane_does(kind: str) -> None:
    body, arguments = BODIES[kind]
    check_same_bits(6, (2, 3, 4), body, **arguments)


class Odd(nn.Module):
    """Buffers of every kind."""

    phases: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(5, 3)
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("later", None)
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.phases = self.phases + torch.complex(y[0].detach(), y[1].detach())
        self.cache = torch.arange(float(len(x)))
        self.later = torch.ones(len(x))
        self.seen += 1
        return y * self.later[:, None]


def test_buffers_of_every_kind(caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = run(lambda transport: train(transport, 4, make=Odd), 1)
    for size in (2, 4):
        for got in run(lambda transport: train(transport, 4, make=Odd), size):
            assert all(torch.equal(got[name], value) for name, value in alone.items())
    assert torch.equal(alone["cache"], torch.arange(4.0))
    assert int(alone["seen"]) == 4
    assert {message.split()[2] for message in caplog.messages} == {"cache", "later"}


class Wide(nn.Module):
    """Running statistics of more than a mebibyte, which a kernel changes without counting a version."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = mlp(5, 2), nn.BatchNorm1d(150_000, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x).double().repeat(1, 75_000))
        return out[:, :3]


class Borrowing(nn.Module):
    """Its buffers are memory of others for a while: of its input, of its weights, of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = seeded(nn.Linear(5, 3))
        sums = torch.zeros(4)
        self.register_buffer("input", torch.zeros(4, 5))
        self.register_buffer("weight", torch.zeros(3, 5))
        self.register_buffer("some", sums[:2])
        self.register_buffer("sums", sums)
        self.register_buffer("narrow", torch.zeros(2).to(torch.float8_e4m3fn))
        self.some: torch.Tensor
        self.sums: torch.Tensor
        self.narrow: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        self.input, self.weight = x, self.layer.weight.detach()
        self.some += out.detach().mean()
        self.sums[2:] += out.detach().sum()
        self.narrow.copy_(self.narrow.float() + 1)
        return out


@pytest.mark.parametrize("make", [Wide, Borrowing])
def test_buffers_that_are_hard_to_follow(make: Callable[[], nn.Module]) -> None:
    dealt: dict[tuple[int, int], torch.Tensor] = {}
    state = check_same_bits(4, (2, 3), make=make, deal=lambda *at: dealt.setdefault(at, microbatch(*at)))
    assert all(torch.equal(x, microbatch(*at)) for at, x in dealt.items())
    if make is Borrowing:
        module, total = Borrowing(), torch.zeros(4)
        for lane in range(4):  # of the first step: the weights are known
            module.sums.zero_()
            module(microbatch(0, lane))
            total += module.sums / 4
        (got,) = run(lambda transport: train(transport, 4, make=Borrowing, steps=1), 1)
        assert torch.allclose(got["sums"], total)
        assert torch.equal(got["some"], got["sums"][:2])
        assert torch.equal(state["narrow"].float(), torch.full((2,), 4.0))


def test_a_loop_that_zip_ends() -> None:
    """zip() asks its first part first, so the loop over lanes is not asked for more."""

    def body(transport: Transport, zipped: bool) -> tuple[State, torch.Tensor]:
        model = DDP(net(), transport=transport, lanes=4)
        for step in range(2):
            lanes = model.lanes([microbatch(step, lane) for lane in model.own_lanes], step)
            for x in (x for _, x in zip(model.own_lanes, lanes, strict=False)) if zipped else lanes:
                plain(model, x, step, 0)
            del lanes
            model.zero_grad()
        return model.module.state_dict(), torch.get_rng_state()

    (wanted, _), *_ = run(lambda transport: body(transport, False), 1)
    for size in (1, 2):
        for got, _ in run(lambda transport: body(transport, True), size):
            assert all(torch.equal(got[name], value) for name, value in wanted.items())


def _retry(model: Any, x: torch.Tensor) -> None:
    with model.weight(2.0):
        model(x).sum().backward()


AFTER_A_FAILURE: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "skip": lambda model, _: model.skip_batch(),
    "sync": lambda model, _: model.sync_gradients(),
    "retry": _retry,
    "go on": lambda *_: None,
}


@pytest.mark.parametrize("then", AFTER_A_FAILURE)
@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_that_raised_cannot_be_mended(size: int, then: str) -> None:
    """Not in any lane, nor if it was to be followed by others: what it has left behind is not known."""

    def attempt(model: Any, step: int, fails: int, *, syncs: bool) -> None:
        for number, x in model.lanes([(n, microbatch(0, n)) for n in model.own_lanes], step):
            hidden = model.module[:2](x)
            if number == fails:
                hidden.register_hook(_raise)  # when the last layer has its gradient already
            try:
                with model.weight(2.0), nullcontext() if syncs else model.no_sync():
                    model.module[2](hidden).sum().backward()
                if not syncs:
                    model.sync_gradients()
            except ZeroDivisionError:
                AFTER_A_FAILURE[then](model, x)

    def body(transport: Transport) -> Any:
        model = DDP(mlp(5, 6, 3), transport=transport, lanes=4)
        for step, (lane, syncs) in enumerate([(0, True), (1, True), (2, False), (3, True), (3, False)]):
            with pytest.raises(BackwardAborted, match=f"lane {lane} in step {step}|on rank {lane * size // 4},"):
                attempt(model, step, lane, syncs=syncs)
        for number, x in model.lanes([(n, microbatch(1, n)) for n in model.own_lanes], 9):
            plain(model, x, 1, number)
        return model.module[0].weight.grad.clone()

    grads = run(body, size)
    module: Any = mlp(5, 6, 3)
    module(torch.cat([microbatch(1, lane) for lane in range(4)])).square().mean().backward()
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert torch.allclose(grads[0], module[0].weight.grad)


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_the_cut_into_buckets_changes_no_bit() -> None:
    usual = check_same_bits(5, (2,))
    single = check_same_bits(5, (3,), bucket_cap_mb=1e-6)
    assert all(torch.equal(single[name], value) for name, value in usual.items())


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_modules_in_random_worlds(data: st.DataObject) -> None:
    widths = [5, *data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)), 3]
    lanes = data.draw(st.integers(1, 7))
    sizes = tuple(sorted(data.draw(st.sets(st.integers(1, lanes), min_size=1, max_size=1))))
    body = data.draw(st.sampled_from([plain, accumulated, weighted]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    bucket = data.draw(st.sampled_from([None, 1e-6, 1e-3]))
    check_same_bits(lanes, sizes, body, make=lambda: mlp(*widths), dtype=dtype, bucket_cap_mb=bucket)


def test_sums_take_as_many_copies_as_the_tree_has_levels() -> None:
    def copies(transport: Transport) -> int:
        model = DDP(mlp(5, 6, 3), transport=transport, lanes=8)
        held = 0
        for x in model.lanes([microbatch(0, lane) for lane in model.own_lanes], 0):
            plain(model, x, 0, 0)
            sums = model._core.batch.lanes._sums.values()
            held = max(held, *(len(stack) for stack in sums), 0)
        return held

    assert run(copies, 1) == [3]
    assert run(copies, 8) == [0] * 8


# Bad input.


def refused(
    message: str, attempt: Callable[[Transport], Any], size: int = 2, kind: type[Exception] = UsageError
) -> None:
    def body(transport: Transport) -> None:
        with pytest.raises(kind, match=message):
            attempt(transport)

    run(body, size)


WRONG: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "too few": (r"lanes=1 is smaller than the world of 2 ranks", net, {"lanes": 1}),
    "no number": (r"lanes='8' is not a number of lanes", net, {"lanes": "8"}),
    "none at all": (r"lanes=0 is not a number of lanes", net, {"lanes": 0}),
    "explicit": (r"cannot be combined with overlap=False", net, {"lanes": 4, "overlap": False}),
    "batch norm over ranks": (
        r"cannot be combined with the SyncBatchNorm 1",
        lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
        {"lanes": 4},
    ),
    "sparse": (r"need dense gradients, but the module makes", lambda: nn.Embedding(3, 2, sparse=True), {"lanes": 4}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_lanes_that_cannot_be(kind: str) -> None:
    message, make, arguments = WRONG[kind]
    refused(message, lambda transport: DDP(make(), transport=transport, **arguments))


def test_ranks_that_want_different_lanes() -> None:
    refused("lanes", lambda transport: DDP(net(), transport=transport, lanes=4 + transport.rank), kind=Exception)


def test_a_loop_that_does_not_fit() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=4)
        with pytest.raises(UsageError, match=r"runs 2 of 4 lanes \(lanes \d to \d\).*got 3"):
            next(model.lanes([microbatch(0, 0)] * 3, 0))
        with pytest.raises(UsageError, match=r"trains in 4 lanes, but no lane is running"):
            plain(model, microbatch(0, 0), 0, 0)
        with pytest.raises(UsageError, match=r"lane \d of step 0 ended without a backward"):
            list(model.lanes([microbatch(0, 0)] * 2, 0))
        x = next(model.lanes([microbatch(0, 0)] * 2, 0))
        plain(model, x, 0, 0)
        with pytest.raises(UsageError, match=r"has already run its backward"):
            plain(model, x, 0, 0)
        with pytest.raises(
            UsageError, match=r"skip_batch\(\) applies to the running lane, but lane \d of step 0 has already"
        ):
            model.skip_batch()
        with pytest.raises(UsageError, match=r"step must be a whole number, .* got 1\.0"):
            model.lanes([microbatch(0, 0)] * 2, 1.0)
        loop = model.lanes([microbatch(0, 0)] * 2, 1)
        with model.no_sync():
            plain(model, next(loop), 1, 0)
            model.sync_gradients()  # does nothing here
        with pytest.raises(
            UsageError, match=r"lane \d of step 1 .* closes it: its only backward ran inside no_sync\(\)"
        ):
            next(loop)
        next(model.lanes([microbatch(0, 0)] * 2, 2))
        with pytest.raises(UsageError, match=r"sync_gradients\(\) closes lane \d of step 2, which has had no backward"):
            model.sync_gradients()
        with pytest.raises(
            UsageError, match=r"the loop over model\.lanes\(\) for step 3 resumed after another such loop had started"
        ):
            list(zip(model.lanes([microbatch(0, 0)] * 2, 3), model.lanes([microbatch(0, 0)] * 2, 3), strict=True))

    run(body, 2)


def test_a_micro_of_another_shape() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=4)
        for x in model.lanes([draw(0, 4, 5), draw(0, 3, 5)], 0):
            plain(model, x, 0, 0)

    refused(
        r"have different shapes \(rank 0: lane 0 \[4, 5\], lane 1 \[3, 5\]; rank 1: lane 2 \[4, 5\], lane 3", attempt
    )


def test_micros_of_different_shapes_on_different_ranks() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=2)
        for x in model.lanes([draw(0, 4 - transport.rank, 5)], 3):
            plain(model, x, 0, 0)

    refused(r"step 3 have different shapes.*rank 0: lane 0 \[4, 5\]; rank 1: lane 1 \[3, 5\]", attempt)


def test_lanes_of_different_steps() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=2)
        for x in model.lanes([microbatch(0, 0)], transport.rank):
            plain(model, x, 0, 0)

    refused(r"ranks run lanes of different steps \(rank 0: 0, rank 1: 1\)", attempt, kind=CollectiveMismatch)


def test_gradients_that_were_left_over() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=2)
        for _ in range(2):
            for x in model.lanes([microbatch(0, 0)], 0):
                plain(model, x, 0, 0)

    refused(r"starts from empty gradients, but 0\.weight already has one", attempt)


def test_an_optimizer_that_steps_between_lanes() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in model.lanes([microbatch(0, 0)] * 2, 0):
            plain(model, x, 0, 0)
            optimizer.step()

    refused(r"was called although only", attempt, kind=UnreducedGradients)


def test_reentrant_checkpoints_have_no_place_in_the_sum() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
            out: torch.Tensor = checkpoint(self.layer, y, use_reentrant=True)
            return out

    def attempt(transport: Transport) -> None:
        model = DDP(Twice(), transport=transport, lanes=2)
        for x in model.lanes([microbatch(0, 0)], 0):
            model(x).sum().backward()

    refused(r"got a second gradient in one backward.*use_reentrant=False", attempt)


def test_a_lane_that_fails_is_told_to_all() -> None:
    def body(transport: Transport) -> State:
        model = DDP(mlp(5, 3), transport=transport, lanes=4)
        error: type[Exception] = ZeroDivisionError if transport.rank == 0 else BackwardAborted

        def attempt() -> None:
            for x in model.lanes([microbatch(0, lane) for lane in model.own_lanes], 0):
                plain(model, x, 0, 0)
                if transport.rank == 0:
                    raise ZeroDivisionError

        with pytest.raises(error):
            attempt()
        for lane, x in model.lanes([(lane, microbatch(1, lane)) for lane in model.own_lanes], 1):
            plain(model, x, 1, lane)
        return {name: param.grad.clone() for name, param in model.module.named_parameters()}

    one, other = run(body, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fault", ["data", "too few"])
def test_a_step_that_cannot_begin_is_told_to_all(fault: str) -> None:
    """The other ranks run it: they hear of it, and all go on with the step after it."""

    def dealt(lanes: range, wrong: bool) -> Iterator[torch.Tensor]:
        for lane in lanes[wrong:]:
            if wrong and fault == "data":
                raise ZeroDivisionError
            yield microbatch(0, lane)

    def body(transport: Transport) -> State:
        model = DDP(net(), transport=transport, lanes=4)
        wrong = transport.rank == 1
        error = BackwardAborted if not wrong else ZeroDivisionError if fault == "data" else UsageError

        def attempt() -> None:
            for x in model.lanes(dealt(model.own_lanes, wrong), 0):
                plain(model, x, 0, 0)

        with pytest.raises(error):
            attempt()
        if wrong:
            with pytest.raises(UsageError, match="no lane is running"):
                plain(model, microbatch(0, 0), 0, 0)
            model.module.load_state_dict(net().state_dict())  # that forward has changed statistics
        for lane, x in model.lanes([(lane, microbatch(1, lane)) for lane in model.own_lanes], 1):
            plain(model, x, 1, lane)
        return {name: param.grad.clone() for name, param in model.module.named_parameters()}

    one, other = run(body, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


FAULTS = [*((place, lane) for place in ("forward", "backward") for lane in range(4)), ("after", 0), ("after", 3)]


def lane_with_fault(model: Any, x: torch.Tensor, place: str) -> None:
    out = model(x)
    if place == "forward":
        raise ZeroDivisionError
    if place == "backward":
        out.register_hook(_raise)
    out.square().mean().backward()
    if place == "after":
        raise ZeroDivisionError


def train_with_faults(transport: Transport, *, faulty: bool, named: bool = False) -> State:
    """Two steps are whole: the last but one, whose fault comes when all lanes have had their backward, and the last."""
    last = len(FAULTS)
    model = DDP(net(), transport=transport, lanes=4)
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(0 if faulty else last - 1, last + 1):
        place, at = FAULTS[step] if faulty and step < last else ("", -1)
        loop = model.lanes([(n, microbatch(step, n)) for n in model.own_lanes], step)
        held.append(loop if named else None)
        try:
            for number, x in loop:
                lane_with_fault(model, x, place if number == at else "")
        except (ZeroDivisionError, BackwardAborted):
            assert place
        del loop
        if step >= last - 1:
            optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_that_fails_leaves_no_trace(size: int, named: bool) -> None:
    """Neither in buffers, wherever it fails; a step that was whole before the error counts. `named`: someone holds the
    iterator, so that it does not hear that its loop was left."""
    (wanted,) = run(lambda transport: train_with_faults(transport, faulty=False), 1)
    for got in run(lambda transport: train_with_faults(transport, faulty=True, named=named), size):
        assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_two_loops_side_by_side() -> None:
    """zip() ends the first of them and leaves the second."""

    def body(transport: Transport) -> State:
        one, other = (DDP(net(), transport=transport, lanes=4, seed=seed) for seed in (1, 2))
        before = torch.get_rng_state(), random.getstate()
        for step in range(2):
            microbatches = [microbatch(step, lane) for lane in one.own_lanes]
            for x, y in zip(one.lanes(microbatches, step), other.lanes(microbatches, step), strict=False):
                (one(x).square().mean() * torch.rand(()) + other(y).square().mean()).backward()
            one.zero_grad()
            other.zero_grad()
        if transport.size == 1:  # ranks that are threads share the generators
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]
        return {**one.module.state_dict(prefix="one."), **other.module.state_dict(prefix="other.")}

    (wanted,) = run(body, 1)
    for got in run(body, 2):
        assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("when", ["in a loop", "between loops"])
def test_a_loop_that_is_heard_of_late_changes_no_generator(when: str) -> None:
    """Who keeps an error keeps the loop that it left. Numbers that were seeded since go on as they are."""

    def body(transport: Transport) -> None:
        one, other = (DDP(net(), transport=transport, lanes=2) for _ in range(2))
        held = [one.lanes([microbatch(0, 0), microbatch(0, 1)], 0)]
        plain(one, next(held[0]), 0, 0)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        for x in other.lanes([microbatch(0, 0), microbatch(0, 1)], 0):
            plain(other, x, 0, 0)
            if when == "in a loop":
                held.clear()
        held.clear()
        assert torch.equal(torch.get_rng_state(), before)

    run(body, 1)


def test_a_module_that_is_converted_after_wrapping() -> None:
    def body(transport: Transport, late: bool) -> tuple[torch.Tensor, bool]:
        module: Any = mlp(5, 6, 3) if late else mlp(5, 6, 3).double()
        model = DDP(module, transport=transport, lanes=4)
        if late:
            for x in model.lanes([microbatch(0, lane) for lane in model.own_lanes], 0):
                plain(model, x, 0, 0)
            model.zero_grad()
            module.double()
        for x in model.lanes([microbatch(1, lane).double() / 3 for lane in model.own_lanes], 1):
            plain(model, x, 1, 0)
        grad = module[0].weight.grad.clone()
        model.zero_grad()
        loop, refuses = model.lanes([microbatch(2, lane).double() for lane in model.own_lanes], 2), False
        plain(model, next(loop), 2, 0)
        if (x := next(loop, None)) is not None:
            module.float()
            with pytest.raises(
                UsageError, match=r"another dtype during the loop over lanes \(before lane \d of step 2"
            ):
                model(x.float())
            refuses = True
        return grad, refuses

    (wanted, _), *_ = run(lambda transport: body(transport, False), 1)
    for size in (1, 2):
        for got, refused_it in run(lambda transport: body(transport, True), size):
            assert torch.equal(got, wanted)
            assert refused_it


def test_a_buffer_that_comes_with_the_first_forward() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(5, 3)
            self.register_buffer("later", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.later = torch.ones(3)
            out: torch.Tensor = self.layer(x) * self.later
            return out

    def body(transport: Transport) -> torch.Tensor:
        model = DDP(Late(), transport=transport, lanes=4)
        for step in range(3):
            if step != 1:
                model.module.later = None
            for x in model.lanes([microbatch(step, lane) for lane in model.own_lanes], step):
                plain(model, x, step, 0)
            model.zero_grad()
        later: torch.Tensor = model.module.later
        return later.clone()

    for size in (1, 2):
        assert all(torch.equal(later, torch.ones(3)) for later in run(body, size))


def test_sums_that_may_still_be_sent_are_not_written_to() -> None:
    def body(transport: Transport) -> int:
        model = DDP(mlp(5, 6, 3), transport=transport, lanes=6)

        def step(number: int) -> None:
            for x in model.lanes([microbatch(number, lane) for lane in model.own_lanes], number):
                plain(model, x, number, 0)
            model.zero_grad()

        step(0)
        used = len(model._core.batch.lanes._free)
        if transport.rank == 0:
            with pytest.raises(PeerLost):  # the other has ended
                step(1)
            assert not model._core.batch.lanes._free
        return used

    assert all(run(body, 2))


def test_parameters_that_no_lane_has_used() -> None:
    def attempt(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport, lanes=4, unused="error")
        for lane, x in model.lanes([(lane, microbatch(0, lane)) for lane in model.own_lanes], 0):
            of_branches(model, x, 0, lane)

    for size in (1, 2, 4):
        refused(
            r"in any lane of this step:\n  b\.weight: unused in all lanes\n  b\.bias: un",
            attempt,
            size,
            UnusedParameters,
        )


def test_what_is_hardly_meant_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=4)
        for number in range(4):
            for x in model.lanes([microbatch(0, lane) for lane in model.own_lanes], 7):
                plain(model, x, 0, 0)
                if number > 1:
                    model.zero_grad()
            model.zero_grad()

    caplog.set_level(logging.WARNING, "paceline")
    run(body, 2)
    same, gone = caplog.messages
    assert same.startswith("step 7 was run before, so its random numbers")
    assert gone.startswith("the gradients of step 7 were dropped before its loop over lanes ended")


def test_steps_that_may_repeat_and_gradients_that_were_used(caplog: pytest.LogCaptureFixture) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, lanes=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        next(model.lanes([microbatch(0, lane) for lane in model.own_lanes], 0))  # given up, and made again
        for lane, x in model.lanes([(lane, microbatch(0, lane)) for lane in model.own_lanes], 0):
            plain(model, x, 0, lane)
            if lane == 1:
                optimizer.step()
                optimizer.zero_grad()
        for _ in model.lanes(list(model.own_lanes), 1):
            model.skip_batch()

    run(body, 1)
    assert not caplog.messages


# Votes and skipped batches, also without lanes.


def test_votes_are_heard_by_all_in_the_same_step() -> None:
    def body(transport: Transport) -> list[dict[str, list[int]]]:
        model, gathered = DDP(mlp(5, 3), transport=transport), []
        for step in range(3):
            model.vote(stop=step == transport.rank, save=step == 1, exhausted=transport.rank == 2)
            plain(model, microbatch(step, transport.rank), step, 0)
            gathered.append(model.votes)
        return gathered

    for gathered in run(body, 3):
        assert [votes["stop"] for votes in gathered] == [[0], [1], [2]]
        assert [votes["save"] for votes in gathered] == [[], [0, 1, 2], []]
        assert [votes["exhausted"] for votes in gathered] == [[2]] * 3


def test_a_rank_that_skips_counts_for_nothing() -> None:
    def body(transport: Transport) -> tuple[torch.Tensor, Any]:
        module = mlp(5, 3)
        module.register_buffer("sent with every forward", torch.ones(1))
        model = DDP(module, transport=transport)
        if transport.rank == 1:
            model.skip_batch()
        else:
            plain(model, microbatch(0, transport.rank), 0, 0)
        some = model.module[0].weight.grad.clone()
        model.zero_grad()
        model.skip_batch()
        return some, model.module[0].weight.grad

    module: Any = mlp(5, 3)
    for rank in (0, 2):
        (module(microbatch(0, rank)).square().mean() / 2).backward()
    for some, none in run(body, 3):
        assert torch.allclose(some, module[0].weight.grad)
        assert none is None


def test_a_refused_backward_outside_of_lanes_leaves_nothing_to_step_on() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 4, 2), transport=transport, lanes=2)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(UsageError, match="no lane is running"):
            model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    run(body, 2)
