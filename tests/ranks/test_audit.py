"""Audits: a rank that computes wrong is named, a quiet run is not disturbed, and training keeps its bits.

Ranks are threads here; tests/procs has real ones, with dropout and over every transport.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.agree.audit import audit_of
from paceline.agree.capsule import read_capsule
from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import UsageError, WrongGradients
from paceline.replica.agreement import Agreement
from tests.models import DDP, draw, seeded

State = dict[str, torch.Tensor]
Loop = Callable[[Any, list[torch.Tensor], int], int]  # one pass over the lanes; returns how often its body ran


def net() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.BatchNorm1d(16, momentum=0.3), nn.Linear(16, 3)))


def plain(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    times = 0
    for x in model.lanes(microbatches, step):
        model(x).square().mean().backward()
        x.zero_()  # it is the loop's own
        times += 1
    return times


class BitFlips:
    """Flips one bit of a gradient in chosen backwards of one rank, counted from 0."""

    def __init__(self, model: Any, backwards: Callable[[int], bool], name: str = "3.weight", element: int = 4) -> None:
        self._count, self._wanted, self._element = 0, backwards, element
        model.module.get_parameter(name).register_hook(self)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        number, self._count = self._count, self._count + 1
        if self._wanted(number):
            grad = grad.clone()
            grad.view(-1).view(torch.int32)[self._element] ^= 1 << 21
        return grad


def train(
    transport: Transport,
    *,
    lanes: int = 4,
    steps: int = 6,
    loop: Loop = plain,
    prepare: Callable[[Any, int], object] | None = None,
    placement: str = "ddp",
    make: Callable[[], nn.Module] = net,
    **agreement: Any,
) -> tuple[State, list[int]]:
    settings = Agreement(**{"audit_every": 1, **agreement})
    model = DDP(make(), transport=transport, lanes=lanes, seed=3, agreement=settings, placement=placement)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    if prepare is not None:
        prepare(model, transport.rank)
    times = []
    for step in range(steps):
        times.append(loop(model, [draw(100 * step + lane, 4, 5) for lane in model.own_lanes], step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.module.state_dict().items()}, times


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize(("lanes", "size"), [(4, 2), (3, 3), (5, 4)])
def test_audits_raise_no_alarm_and_change_no_bits(
    lanes: int, size: int, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        (quiet, _), *_ = run(lambda t: train(t, lanes=lanes, steps=5, audit_every=0), size)
        audited = run(lambda t: train(t, lanes=lanes, steps=5, placement=placement), size)
    assert caplog.messages == []
    assert all(equal(state, quiet) for state, _ in audited)
    assert sum(sum(times) for _, times in audited) == 5 * (lanes + 1), "one lane of each step runs twice"


class Recomputed(nn.Module):
    """With reentrant checkpointing: gradients come from a backward inside the one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)


class Tied(nn.Module):
    """One weight twice, one that takes no part in some lanes, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(5, 5) for _ in range(4))
        self.two.weight = self.one.weight
        self.four.requires_grad_(False)
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.four(self.two(torch.tanh(self.one(x)))))
        return self.three(out) if x[0, 0] > 0 else out


def in_bfloat16(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    for x in model.lanes(microbatches, step):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    return 0


@pytest.mark.parametrize(("make", "loop"), [(Recomputed, plain), (Tied, plain), (net, in_bfloat16)])
def test_other_models_and_types(make: Callable[[], nn.Module], loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        (quiet, _), *_ = run(lambda t: train(t, lanes=5, make=make, loop=loop, audit_every=0), 3)
        assert all(equal(state, quiet) for state, _ in run(lambda t: train(t, lanes=5, make=make, loop=loop), 3))
    assert caplog.messages == []


def accumulated(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    for x in model.lanes(microbatches, step):
        with model.weight(3.3):
            with model.no_sync():
                model(x[:2]).square().mean().backward()
            model(x[2:]).square().mean().backward()
    return 0


def skipped(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    for x in model.lanes(microbatches, step):
        if float(x[0, 0]) > 0:
            model.skip_batch()
        else:
            with model.no_sync():
                model(x).square().mean().backward()
            model.sync_gradients()
    return 0


@pytest.mark.parametrize("loop", [accumulated, skipped])
def test_whatever_a_lane_does_is_repeated(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """Three lanes: what is added before it is divided by 3 has other bits than what is divided first."""
    with caplog.at_level(logging.WARNING, "paceline"):
        (quiet, _), *_ = run(lambda t: train(t, lanes=3, loop=loop, audit_every=0), 2)
        assert all(equal(state, quiet) for state, _ in run(lambda t: train(t, lanes=3, loop=loop), 2))
    assert caplog.messages == []


def caught(transport: Transport, bad: int, backwards: Callable[[int], bool], **settings: Any) -> WrongGradients | None:
    def prepare(model: Any, rank: int) -> None:
        if rank == bad:
            BitFlips(model, backwards)

    try:
        train(transport, steps=20, prepare=prepare, **settings)
    except WrongGradients as error:
        return error
    return None


def always(number: int) -> bool:
    return True


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_computes_wrong_is_named(size: int, bad: int) -> None:
    for error in run(lambda t: caught(t, bad, always), size):
        assert error is not None
        assert (error.ranks, error.known, error.tensor) == ((bad,), True, "3.weight")
        text = str(error)
        assert text.startswith(f"rank {bad} computes wrong")
        assert f"lane {error.lane} of step {error.step}" in text
        assert "element [0, 4]" in text
        assert "bit 21 differs" in text
        assert "Its parameters equal those of the other ranks" in text


@pytest.mark.parametrize(("bad", "backward", "step"), [(0, 3, 1), (1, 2, 0)])
def test_of_two_ranks_the_one_that_contradicts_itself_is_named(bad: int, backward: int, step: int) -> None:
    """A fault that does not stay: its first result is not the second. It may hit the lane's owner, or who audits it."""
    for error in run(lambda t: caught(t, bad, lambda number: number == backward), 2):
        assert error is not None
        assert (error.ranks, error.known, error.step) == ((bad,), True, step)
        assert f"ran it once more, rank {bad} got other bits than before" in str(error)


def test_of_two_ranks_a_fault_that_stays_is_found_and_not_blamed_on_one() -> None:
    for error in run(lambda t: caught(t, 1, always), 2):
        assert error is not None
        assert (set(error.ranks), error.known) == ({0, 1}, False)
        assert "it takes a third rank to say which" in str(error)


def test_a_capsule_holds_the_step(tmp_path: Path) -> None:
    error = run(lambda t: caught(t, 1, always, capsules=str(tmp_path)), 3)[0]
    assert error is not None
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert (capsule.kind, capsule.step, capsule.ranks) == ("divergence", error.step, (1,))
    assert capsule.error == str(error)
    assert len(capsule.others) == 2


def test_wrong_parameters_are_told_from_wrong_computation() -> None:
    def prepare(model: Any, rank: int) -> None:
        if rank == 2:
            model.module[0].weight.data[1, 1] += 1.0

    def body(transport: Transport) -> str:
        with pytest.raises(WrongGradients) as caught:
            train(transport, prepare=prepare, state_every=0)
        assert caught.value.ranks == (2,)
        return str(caught.value)

    assert "Its parameters differ from those of the other ranks" in run(body, 3)[0]


def test_a_warning_instead_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert run(lambda t: caught(t, 1, lambda number: number == 1, audit="warn"), 3) == [None] * 3
    assert len(caplog.messages) == 1, "one rank says it"
    assert "rank 1 computes wrong" in caplog.messages[0]


def test_the_step_that_raises_leaves_no_trace() -> None:
    """It can be made again, and then the run has the bits of one without a fault."""

    def body(transport: Transport) -> State:
        model = DDP(net(), transport=transport, lanes=4, seed=3, agreement=Agreement(audit_every=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if transport.rank == 1:
            BitFlips(model, lambda number: number == 1)
        step, failures = 0, 0
        while step < 4:
            try:
                plain(model, [draw(100 * step + lane, 4, 5) for lane in model.own_lanes], step)
            except WrongGradients:
                failures += 1
                assert all(param.grad is None for param in model.parameters())
                continue
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        assert failures == 1
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    (quiet, _), *_ = run(lambda t: train(t, steps=4, audit_every=0), 3)
    assert all(equal(state, quiet) for state in run(body, 3))


def zipped(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    for x, _ in zip(model.lanes(microbatches, step), range(len(microbatches)), strict=False):
        model(x).square().mean().backward()
    return 0


def zipped_last(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    for _, x in zip(range(len(microbatches)), model.lanes(microbatches, step), strict=False):
        model(x).square().mean().backward()
    return 0


@pytest.mark.parametrize("loop", [zipped, zipped_last])
def test_a_loop_that_ends_early_is_not_audited_and_says_so(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    (quiet, _), *_ = run(lambda t: train(t, audit_every=0), 2)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert all(equal(state, quiet) for state, _ in run(lambda t: train(t, loop=loop), 2))
    assert caplog.messages
    assert all("was not audited" in message for message in caplog.messages)


def failing(model: Any, microbatches: list[torch.Tensor], step: int) -> int:
    """Nothing of what happens in a repeated lane disturbs the step."""
    audit = audit_of(step, 1, 4, model._core.group.size)
    fails = step == 1 and audit is not None and audit.auditor == model._core.group.rank
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        for x in model.lanes(microbatches, step):
            loss = model(x).square().mean()
            if step == 1 and model.repeats_lane:
                loss.register_hook(lambda _: 1 // 0)
            loss.backward()
    return 0


def test_a_repeated_lane_that_fails_leaves_the_step_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    (quiet, _), *_ = run(lambda t: train(t, audit_every=0), 3)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert all(equal(state, quiet) for state, _ in run(lambda t: train(t, loop=failing), 3))
    assert [message for message in caplog.messages if "lane 1 of step 1 was not audited" in message]


class Named(NamedTuple):
    x: torch.Tensor


def test_microbatches_of_the_users_own_kinds(caplog: pytest.LogCaptureFixture) -> None:
    def body(transport: Transport) -> int:
        model, times = DDP(net(), transport=transport, lanes=4, agreement=Agreement(audit_every=1)), 0
        for step in range(3):
            for microbatch in model.lanes([Named(draw(10 * step + lane, 4, 5)) for lane in model.own_lanes], step):
                model(microbatch.x).sum().backward()
                times += 1
            model.zero_grad()
        return times

    with caplog.at_level(logging.WARNING, "paceline"):
        assert sum(run(body, 2)) == 3 * 5
    assert caplog.messages == []


def consume(model: Any, microbatches: list[Any]) -> None:
    for x, _ in model.lanes(microbatches, 0):
        model(x).sum().backward()


def test_what_cannot_be_sent_or_audited_is_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, lanes=2, agreement=Agreement(audit_every=1))
        with pytest.raises(UsageError, match=r"the microbatch of lane 0\.1 cannot be sent to another rank"):
            consume(model, [(draw(0, 4, 5), object())])
        with pytest.raises(UsageError, match="needs lanes="):
            DDP(net(), transport=transport, agreement=Agreement(audit_every=1))
        with pytest.raises(UsageError, match='use placement="zero2"'):
            DDP(net(), transport=transport, lanes=2, agreement=Agreement(audit_every=1), placement="zero3")

    run(body, 2)
    with pytest.raises(UsageError, match=r"audit='heal'"):
        Agreement(audit="heal")
    with pytest.raises(UsageError, match="audit_every=-1"):
        Agreement(audit_every=-1)
