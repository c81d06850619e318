"""Agreement: a replica that drifts is found, named, and healed; gradients that are not finite stop nobody."""

import logging
import random
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.agree.capsule import read_capsule
from paceline.collectives import LocalTransport, Transport
from paceline.collectives.group import finish
from paceline.collectives.threads import run
from paceline.errors import BackwardAborted, ModelMismatch, NoMajority, NotFiniteGradients, ReplicaDrift, UsageError
from paceline.replica.agreement import Agreement
from paceline.replica.capsules import _write_at_exit
from tests.models import DDP, draw, mlp, seeded

EVERY = 4
State = dict[str, torch.Tensor]
PATTERNS = {4: torch.int32, 8: torch.int64}


class Buffered(nn.Module):
    """With statistics that change and a table that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)) * self.table)
        return out


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    pattern = tensor.detach().view(-1).view(PATTERNS[tensor.itemsize])
    width = 8 * tensor.itemsize
    pattern[element] ^= -(1 << (width - 1)) if bit == width - 1 else 1 << bit


class Session:
    """A rank that trains, step by step."""

    def __init__(self, transport: Transport, lanes: int | None = None, **agreement: Any) -> None:
        settings = {"state_every": EVERY, **agreement}
        self.transport = transport
        self.model = DDP(seeded(Buffered()), transport=transport, lanes=lanes, agreement=Agreement(**settings))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step_number = 0

    def step(self, factor: float = 1.0) -> None:
        step, model = self.step_number, self.model
        self.step_number += 1
        if model.own_lanes:
            for lane, x in model.lanes([(lane, draw(100 * step + lane, 6, 5)) for lane in model.own_lanes], step):
                model(x * factor).square().mean().backward()
                assert lane in model.own_lanes
        else:
            model(draw(100 * step + self.transport.rank, 6, 5) * factor).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def state(self) -> State:
        named = dict(self.model.module.named_parameters())
        found = {
            f"{key} of {name}": value
            for name, param in named.items()
            for key, value in self.optimizer.state[param].items()
        }
        return {**named, **(dict(self.model.module.named_buffers()) if self.model.own_lanes else {}), **found}


def test_two_hundred_flipped_bits_are_all_found_and_named() -> None:
    """Of weights, moments and buffers; signs, exponents and mantissas; by every rank, before the next update."""

    def body(transport: Transport) -> list[tuple[str, bool, int]]:
        # Without "skip" an exponent may grow so much that all ranks end with the same NaN everywhere.
        session = Session(transport, lanes=3, state_every=1, drift="heal", not_finite="skip", patience=999)
        drawn = random.Random(5)
        found: list[tuple[str, bool, int]] = []
        for _ in range(2):
            session.step()
        while len(found) < 200:
            odd, state = drawn.randrange(transport.size), session.state()
            name = drawn.choice(sorted(state))
            element = drawn.randrange(state[name].numel())
            bit = drawn.choice([8 * state[name].itemsize - 1, *range(8 * state[name].itemsize - 1)])
            if transport.rank == odd:
                flip(state[name], element, bit)
            told: list[tuple[str, tuple[int, ...]]] = []
            session.model._core.schedule.observer.on_finding = lambda _, text, ranks, __, told=told: told.append(
                (text, tuple(ranks))
            )
            session.step()
            found.append((name, bool(told) and name in told[0][0] and told[0][1] == (odd,), bit))
        return found

    for found in run(body, 3):
        assert [case for case in found if not case[1]] == []
        assert {name.split(" of ")[0] for name, _, _ in found} >= {"exp_avg", "exp_avg_sq", "step", "table"}


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_quiet_run_raises_no_alarm(lanes: int | None, caplog: pytest.LogCaptureFixture) -> None:
    def body(transport: Transport) -> None:
        session = Session(transport, lanes, drift="heal", not_finite="skip")
        for _ in range(3 * EVERY):
            session.step()

    with caplog.at_level(logging.WARNING, "paceline"):
        run(body, 2)
    assert caplog.messages == []


def drifted(transport: Transport, **agreement: Any) -> Any:
    """What became of a run whose rank 1 has one flipped bit after 5 steps."""
    session = Session(transport, **agreement)
    for _ in range(5):
        session.step()
    if transport.rank == 1:
        flip(session.state()["first.weight"], 7, 20)
    try:
        for _ in range(EVERY):
            session.step()
    except ReplicaDrift as error:
        assert error.tensor == "first.weight"
        return str(error), session.step_number - 5
    return session.state()


def test_drift_is_raised_on_every_rank_with_the_rank_that_drifted() -> None:
    outcomes = run(drifted, 3)
    assert len(set(outcomes)) == 1
    text, steps = outcomes[0]
    assert "rank 1" in text and "first.weight" in text
    assert steps <= EVERY


def test_between_two_ranks_nobody_knows_who_is_right() -> None:
    text, _ = run(drifted, 2)[0]
    assert "0 and 1" in text
    with pytest.raises(NoMajority):
        run(drifts_at_once, 2)


def drifts_at_once(transport: Transport) -> None:
    session = Session(transport, drift="heal", state_every=1)
    session.step()
    if transport.rank == 0:
        flip(session.state()["first.weight"], 0, 3)
    session.step()


@pytest.mark.parametrize(("size", "agreement"), [(3, {"drift": "heal"}), (2, {"drift": "heal", "trust": 0})])
def test_healed_replicas_are_equal_again(
    size: int, agreement: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        first, *others = run(lambda transport: drifted(transport, **agreement), size)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)
    whose = "the majority" if size == 3 else "rank 0, as trust=0 asks"
    for text in caplog.messages:
        assert text.startswith("healed: ") and f"All ranks continue with the values of {whose};" in text
        assert "restart" not in text


def test_what_ranks_ask_for_has_to_be_alike_and_possible(tmp_path: Path) -> None:
    def apart(transport: Transport) -> None:
        Session(transport, capsules=tmp_path if transport.rank else None)

    with pytest.raises(ModelMismatch, match="capsules=None on rank 0, .*capsules=a folder on rank 1"):
        run(apart, 2)
    with pytest.raises(UsageError, match=r"trust=2\): expected a rank of this world, 0 to 1"):
        run(lambda transport: Session(transport, drift="heal", trust=2), 2)
    run(lambda transport: Session(transport, drift="heal", trust=2, not_finite="skip"), 1)


def test_with_every_step_compared_it_is_found_before_the_next_update() -> None:
    text, steps = run(lambda transport: drifted(transport, state_every=1), 3)[0]
    assert steps == 1
    assert "step" in text


def test_optimizers_that_are_sharded_are_not_compared() -> None:
    """Each rank steps on other parameters, as ZeRO does, and sends them round."""

    def body(transport: Transport) -> None:
        model = DDP(mlp(5, 4, 3), transport=transport, agreement=Agreement(state_every=2))
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params[transport.rank :: transport.size], lr=1e-2)
        for step in range(6):
            model(draw(10 * step + transport.rank, 4, 5)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            for number, param in enumerate(params):
                paceline.collectives.group.finish(
                    transport.broadcast(param.data.view(-1), number % transport.size), what="", watch=transport.watch
                )

    run(body, 2)


def test_state_that_was_replaced_is_healed_too() -> None:
    def body(transport: Transport) -> State:
        session = Session(transport, drift="heal", trust=0, state_every=8)
        for _ in range(9):
            session.step()
        session.optimizer.load_state_dict(session.optimizer.state_dict())  # new tensors
        if transport.rank == 1:
            flip(session.state()["exp_avg of first.weight"], 3, 28)
        for _ in range(8):
            session.step()
        return {name: value.detach().clone() for name, value in session.state().items()}

    first, other = run(body, 2)
    assert all(torch.equal(other[name], value) for name, value in first.items())


class Anew(torch.optim.Optimizer):
    """Makes a new tensor in every step, and keeps it in a dict of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            kept = self.state[param].setdefault("kept", {"m": [torch.zeros_like(param)]})
            kept["m"][0] = 0.9 * kept["m"][0] + param.grad
            param -= 1e-9 * kept["m"][0]  # too little to be seen there


@pytest.mark.parametrize("after", range(4))
def test_state_that_every_step_makes_anew_is_compared_within_the_rotation(after: int) -> None:
    def body(transport: Transport) -> int:
        session = Session(transport, state_every=4)
        session.optimizer = Anew(session.model.parameters())
        for _ in range(6 + after):
            session.step()
        if transport.rank == 1:
            flip(session.optimizer.state[session.model.module.last.weight]["kept"]["m"][0], 7, 20)
        for step in range(4):
            try:
                session.step()
            except ReplicaDrift as error:
                assert error.tensor == "kept.m.0 of last.weight"
                return step
        raise AssertionError("it was not found")

    first, other = run(body, 2)
    assert first == other


class Tables(nn.Module):
    """Buffers that no lane changes, a small one and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(5, 3)
        self.register_buffer("small", torch.ones(3))
        self.register_buffer("large", torch.ones(300_000))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.small


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("after", range(2))
def test_a_fault_in_a_buffer_that_no_lane_changes(name: str, after: int) -> None:
    """Written past torch, as by a fault of the memory. It is found, and healed with the values of rank 0."""

    def body(transport: Transport) -> bool:
        agreement = Agreement(state_every=4, drift="heal", trust=0)
        model = DDP(Tables(), transport=transport, lanes=2, agreement=agreement)
        for step in range(14):
            if step == 5 + after and transport.rank == 1:
                model.module.get_buffer(name).numpy()[1] = 2.0
            for x in model.lanes([draw(step, 4, 5)] * len(model.own_lanes), step):
                model(x).square().mean().backward()
            model.zero_grad()
        return bool((model.module.get_buffer(name) == 1).all())

    assert run(body, 2) == [True, True]


@pytest.mark.parametrize("lanes", [None, 2])
def test_an_optimizer_that_is_let_go_takes_its_state_along(lanes: int | None) -> None:
    """Steps go on, are compared when another optimizer is there, and find what that one has."""

    def body(transport: Transport) -> None:
        session = Session(transport, lanes)
        session.steps(2 * EVERY + 1)
        before = [weakref.ref(value) for state in session.optimizer.state.values() for value in state.values()]
        session.optimizer = torch.optim.SGD(session.model.parameters(), lr=1e-3)
        assert not any(ref() is not None for ref in before)
        session.steps(EVERY)
        session.optimizer = torch.optim.AdamW(session.model.parameters(), lr=1e-3)
        session.steps(EVERY)
        if transport.rank == 1:
            flip(session.state()["exp_avg of first.weight"], 3, 20)
        with pytest.raises(ReplicaDrift, match=r"exp_avg of first\.weight"):
            session.steps(EVERY + 1)

    run(body, 2)


def test_a_rank_that_lets_its_optimizer_go_later_stops_nobody() -> None:
    def body(transport: Transport) -> None:
        session = Session(transport)
        session.steps(EVERY + 1)
        kept = session.optimizer if transport.rank else None
        session.optimizer = torch.optim.SGD(session.model.parameters(), lr=1e-3)
        session.steps(3 * EVERY)
        del kept
        session.steps(2 * EVERY)
        if transport.rank == 1:
            flip(session.state()["first.weight"], 3, 20)
        with pytest.raises(ReplicaDrift, match=r"first\.weight"):
            session.steps(EVERY + 1)

    run(body, 2)


def test_local_steps_are_no_drift() -> None:
    def body(transport: Transport) -> None:
        session = Session(transport, state_every=1)
        session.step()
        with session.model.no_sync():
            session.step()
        session.step()

    run(body, 2)


def test_mixed_precision_compares_what_is_kept() -> None:
    config = SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=None, buffer_dtype=None)

    def body(transport: Transport) -> None:
        model = DDP(mlp(5, 3), transport=transport, mixed_precision=config, agreement=Agreement(state_every=1))
        model(draw(0, 4, 5)).sum().backward()
        if transport.rank == 1:
            flip(model.module[0].weight, 2, 3)  # lost in bfloat16
        with pytest.raises(ReplicaDrift, match=r"0\.weight"):
            model(draw(0, 4, 5)).sum().backward()

    run(body, 2)


# Not finite.


def poisoned(transport: Transport, lanes: int | None, steps: set[int], **agreement: Any) -> tuple[State, list[str]]:
    session = Session(transport, lanes, **{"not_finite": "skip", "state_every": 1, **agreement})
    told: list[str] = []
    if "capsules" not in agreement:
        session.model._core.schedule.observer.on_finding = lambda kind, text, ranks, _: told.append(
            f"{kind}: {text} {list(ranks)}"
        )
    for number in range(5):
        factor = float("inf") if transport.rank == 1 and number in steps else 1.0
        session.step(factor)
    return {name: value.detach().clone() for name, value in session.state().items()}, told


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(lanes: int | None) -> None:
    results = run(lambda transport: poisoned(transport, lanes, {2, 3}), 3)
    for state, told in results:
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
        assert all(torch.equal(value, results[0][0][name]) for name, value in state.items())
        assert int(state["step of first.weight"]) == 3, "two of five steps were skipped"
        assert len(told) == 2
        assert told[0].startswith("not-finite: the gradient of ") and told[0].endswith(" [1]")


def test_a_sum_over_lanes_that_overflows_is_skipped_in_every_world() -> None:
    """Each lane is finite; over 3 ranks slices are exchanged, over the others one collective adds."""

    def body(transport: Transport) -> torch.Tensor | None:
        model = DDP(nn.Linear(4, 2, bias=False), transport=transport, lanes=4, agreement=Agreement(not_finite="skip"))
        for x in model.lanes([torch.full((1, 4), 1e38) for _ in model.own_lanes], 0):
            with model.weight(1.0):
                model(x).sum().backward()
        found: torch.Tensor | None = model.module.weight.grad
        return found

    for size in (1, 2, 3, 4):
        assert run(body, size) == [None] * size, size


def test_too_many_in_a_row_are_an_error() -> None:
    with pytest.raises(
        NotFiniteGradients, match="caused by the batch of rank 1, as it was in each of the last 2 steps"
    ):
        run(lambda transport: poisoned(transport, None, {1, 2, 3}, patience=2), 2)


def test_it_can_be_raised_at_once() -> None:
    with pytest.raises(
        NotFiniteGradients, match="in step 2, caused by the batch of rank 1; no rank has stepped"
    ) as told:
        run(lambda transport: poisoned(transport, None, {1}, not_finite="raise"), 2)
    assert 'pass not_finite="skip" to continue' in str(told.value)
    with pytest.raises(NotFiniteGradients, match=r"in step 1, caused by the batch of rank 1 \(lanes 2 to 3\); no rank"):
        run(lambda transport: poisoned(transport, 4, {1}, not_finite="raise"), 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drift": "ignore"}, "expected one of 'raise', 'heal'"),
        ({"state_every": -1}, "at least 0"),
        ({"patience": 0}, "at least 1"),
        ({"trust": -1}, "expected a rank, or None"),
        ({"not_finite": "zero"}, "expected one of 'keep', 'skip', 'raise'"),
    ],
)
def test_agreements_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Agreement(**wrong)


# Capsules.


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_capsule_holds_the_step_and_the_batches_of_all_ranks(lanes: int | None, tmp_path: Path) -> None:
    run(lambda transport: poisoned(transport, lanes, {2}, capsules=tmp_path), 2)
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert (capsule.kind, capsule.ranks, capsule.rank, capsule.world_size) == ("not-finite", (1,), 1, 2)
    assert capsule.step == (3 if lanes is None else 2)  # reductions are counted from 1, the loop's steps from 0
    assert [other["rank"] for other in capsule.others] == [0]
    assert "by the batch of rank 1" in capsule.error
    assert capsule.settings["kernels"]["threads"] == str(torch.get_num_threads())
    assert any("launched" in line for line in capsule.collectives)
    assert "first.weight" in capsule.state
    if lanes is None:
        assert not capsule.omitted
        (given,) = capsule.batch
        assert torch.equal(given["args"][0], draw(201, 6, 5) * float("inf"))
        assert given["rng"] is not None
    else:
        assert capsule.lanes == (2, 3)
        assert [lane for lane, _ in capsule.batch] == [2, 3]
        assert torch.equal(capsule.others[0]["batch"][0][1], draw(200, 6, 5))


def broken() -> torch.Tensor:
    """A batch whose backward raises."""

    def fail(_: torch.Tensor) -> None:
        raise ValueError("broken")

    x = draw(7, 6, 5).requires_grad_()
    x.register_hook(fail)
    return x


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_backward_that_raises_leaves_a_capsule(lanes: int | None, tmp_path: Path) -> None:
    """On the rank where it did, with what that step was given."""

    def body(transport: Transport) -> None:
        session = Session(transport, lanes, capsules=tmp_path)
        session.step()
        model, fails = session.model, transport.rank == 1
        x = broken() if fails else draw(7, 6, 5)

        def one_step() -> None:
            for microbatch in model.lanes([x] * len(model.own_lanes), 1) if lanes else [x]:
                model(microbatch).square().mean().backward()

        if fails:  # it goes on, and with its next step the others learn of it
            with pytest.raises(ValueError, match="broken"):
                one_step()
        else:
            with pytest.raises(BackwardAborted):
                one_step()
        model.zero_grad()
        session.step_number = 2
        session.step()

    run(body, 2)
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert (capsule.kind, capsule.rank, capsule.step) == ("crash", 1, 1 if lanes else 2)
    assert capsule.error == "backward raised"
    assert torch.equal(capsule.batch[0] if lanes else capsule.batch[0]["args"][0], draw(7, 6, 5))


@pytest.mark.parametrize("lanes", [None, 2])
def test_an_error_that_ends_the_script_in_a_step_leaves_a_capsule(
    lanes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was raised between forward and backward. Python keeps it in sys.last_value."""
    agreement = Agreement(capsules=tmp_path)
    model = DDP(mlp(4, 2), transport=LocalTransport(), lanes=lanes, agreement=agreement)
    monkeypatch.setattr(sys, "last_value", IndexError("in the loss"), raising=False)
    given = [draw(0, 3, 4), draw(1, 3, 4)] if lanes else [draw(0, 3, 4)]
    for x in model.lanes(given, 5) if lanes else given:
        model(x).sum().backward()
    model.zero_grad()
    _write_at_exit()
    assert not list(tmp_path.iterdir()), "it came after the step"
    loop: Any = model.lanes(given, 6) if lanes else iter(given)
    model(next(loop))
    _write_at_exit()
    _write_at_exit()
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert (capsule.kind, capsule.error, capsule.step) == ("crash", "IndexError: in the loss", 6 if lanes else 2)


def test_all_micros_of_a_step_are_kept_and_what_changed_since_is_named(tmp_path: Path) -> None:
    agreement = Agreement(not_finite="skip", capsules=tmp_path)
    model = DDP(mlp(4, 2), transport=LocalTransport(), agreement=agreement)
    reused = torch.full((3, 4), float("nan"))
    with model.no_sync():
        model(reused).sum().backward()
    reused.fill_(2.0)  # a loader that reads into the same memory again
    with torch.no_grad():
        model(draw(9, 1, 4))
    model(draw(0, 3, 4)).sum().backward()
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert [tuple(one["args"][0].shape) for one in capsule.batch] == [(3, 4), (3, 4)]
    assert capsule.omitted == ("batch.0.args.0: changed since the step began",)
    assert torch.equal(capsule.batch[1]["args"][0], draw(0, 3, 4))


class Awkward(nn.Linear):
    """Takes what no capsule can hold, and keeps state that is no tensor."""

    broken = False

    def forward(self, x: torch.Tensor, extra: object = None) -> torch.Tensor:
        if self.broken:
            raise KeyError("the user's own error")
        return super().forward(x)

    def get_extra_state(self) -> object:
        if self.broken:
            raise RuntimeError("device-side assert triggered")
        return {"a": "set"}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_a_capsule_cannot_hold_hides_no_error_and_stops_no_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(transport: Transport) -> None:
        model = DDP(Awkward(4, 2), transport=transport, agreement=Agreement(not_finite="skip", capsules=tmp_path))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        for step in range(10):
            factor = float("nan") if step and transport.rank == 1 else 1.0
            model(draw(step, 3, 4) * factor, extra=nested if transport.rank == 0 else None).sum().backward()
            assert (model.module.weight.grad is None) is bool(step)
            model.zero_grad()
        model.module.broken = True
        with pytest.raises(KeyError, match="the user's own error"):
            model(draw(0, 3, 4))

    with caplog.at_level(logging.WARNING, "paceline"):
        run(body, 2)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8, "of nine steps that were skipped"
    capsule = read_capsule(files[0])
    assert [other["rank"] for other in capsule.others] == [0]
    assert "extra" not in str(capsule.state)
    assert sum("no failure capsule could be made" in text for text in caplog.messages) == 2


def test_a_capsule_of_drift_tells_the_tensors_of_all_ranks_apart(tmp_path: Path) -> None:
    run(lambda transport: drifted(transport, capsules=tmp_path, about={"made of": "clay"}), 3)
    (file,) = tmp_path.iterdir()
    capsule = read_capsule(file)
    assert (capsule.kind, capsule.ranks, capsule.settings["made of"]) == ("divergence", (1,), "clay")
    first, odd, last = capsule.settings["words"]["first.weight"]
    assert first == last != odd
    assert len(set(capsule.settings["words"]["last.bias"])) == 1


def test_a_forward_that_raises_leaves_a_capsule(tmp_path: Path) -> None:
    def body(transport: Transport) -> None:
        session = Session(transport, capsules=tmp_path)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
            session.model(draw(0, 6, 4))
        assert not list(tmp_path.iterdir()), "an evaluation is no step"
        finish(transport.all_gather(torch.empty(2), torch.ones(1)), what="the look", watch=transport.watch)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            session.model(draw(0, 6, 4))

    run(body, 1 + 1)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"step-00000001-crash-rank-{rank}.capsule" for rank in (0, 1)
    ]
    assert "shapes cannot be multiplied" in read_capsule(next(tmp_path.iterdir())).error
