"""`paceline replay`: a capsule's step is run again, and what went wrong is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.agree.capsule import Capsule, write_capsule
from paceline.agree.state_digest import state_digest
from paceline.cli.replay import main
from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.randomness import mixed, put_back, rng_state
from paceline.replica.agreement import Agreement
from paceline.train.config import TrainConfig
from paceline.train.model import GPT
from tests.models import DDP, seeded

HERE = "tests.unit.test_replay"


class Root(nn.Module):
    """Of what it is given: not finite below zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().amin()) < 0:
            raise ArithmeticError("below zero")
        return x


class Unsteady(nn.Module):
    """Draws from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.source)


def net(middle: type[nn.Module] = Root) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Softplus(), middle(), nn.BatchNorm1d(4)))


def root() -> nn.Module:
    model = net()
    model[2] = nn.Identity()  # type: ignore[operator]
    return model


def picky() -> nn.Module:
    return nn.Sequential(Picky(), nn.Linear(4, 4))


def unsteady() -> nn.Module:
    return net(Unsteady)


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    out: torch.Tensor = model(x)
    return (out - y).square().mean()


def not_a_loss(model: nn.Module, batch: Any) -> str:
    return "none"


def microbatch(number: int) -> torch.Tensor:
    return torch.rand(6, 4, generator=torch.Generator().manual_seed(number))


def wholly(model: nn.Module, **more: Any) -> Capsule:
    """A capsule of two ranks with two lanes each."""
    given: dict[str, Any] = {"kind": "not-finite", "ranks": (1,), "error": "it went wrong"}
    given |= {"rank": 1, "world_size": 2, "lanes": (2, 3), "batch": [microbatch(2), microbatch(3)], "seed": 7}
    given["others"] = ({"rank": 0, "lanes": (0, 1), "batch": [microbatch(0), microbatch(1)], "rng": None},)
    return Capsule(step=12, state=model.state_dict(), **(given | more))


Replay = Callable[..., tuple[int, str]]


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    def replay(capsule: Capsule, **more: Any) -> tuple[int, str]:
        code = main(write_capsule(tmp_path / "a.capsule", capsule), **more)
        found = capsys.readouterr()
        return code, found.out + found.err

    return replay


def test_the_first_tensor_that_is_not_finite_is_named(replay: Replay) -> None:
    batch = [microbatch(2), microbatch(3)]
    batch[1][4, 2] = float("inf")
    code, text = replay(wholly(net(), batch=batch), model=f"{HERE}:net")
    assert code == 0
    assert "not-finite in step 12, at fault: rank 1 of 2" in text and "it went wrong" in text
    assert "reproduced: rank 1, lane 3: not finite, first in input: 1 × Inf" in text
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "1"], ["1", "2"], ["1", "3"]]
    assert [row[3] for row in rows] == ["yes", "yes", "yes", "NO"]


def test_it_is_the_innermost_module_that_made_it(replay: Replay) -> None:
    code, text = replay(wholly(root(), batch=[microbatch(2), microbatch(3)]), model=f"{HERE}:root")
    assert code == 0
    assert "first in the output of 3 (Root):" in text


def test_a_gradient_may_be_the_first(replay: Replay) -> None:
    """The root of zero is finite, its slope is not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Root())
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    code, text = replay(wholly(model), model=f"{HERE}:flat")
    assert code == 0
    assert "first in the gradient of the output of 0 (Linear): 24 × Inf" in text


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), Root())


def test_what_is_finite_is_not_reproduced(replay: Replay) -> None:
    code, text = replay(wholly(net()), model=f"{HERE}:net")
    assert code == 1
    assert "not reproduced: everything that was computed is finite" in text


def test_random_numbers_are_those_of_the_lane(replay: Replay) -> None:
    """The same losses as by hand, with dropout."""
    model = net()
    expected = []
    for lane in range(4):
        with put_back():
            torch.manual_seed(mixed(7, 12, lane))
            expected.append(f"{float(model(microbatch(lane)).detach().mean()):.6g}")
            model = net()
    _, text = replay(wholly(net()), model=f"{HERE}:net")
    assert [line.split()[2] for line in text.splitlines() if line[:1].isdigit()] == expected


def test_without_lanes_the_saved_generators_are_taken_and_the_loss_may_be_ones_own(replay: Replay) -> None:
    model = net()
    with put_back():
        torch.manual_seed(99)
        state = rng_state()
        expected = float(squares(model, (microbatch(0), microbatch(1))).detach())
    plain = wholly(
        net(),
        lanes=(),
        others=(),
        rng=state,
        batch={"args": (microbatch(0), microbatch(1)), "kwargs": {}},
        kind="crash",
    )
    code, text = replay(plain, model=f"{HERE}:net", loss=f"{HERE}:squares")
    assert code == 1 and "nothing was raised" in text
    (row,) = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert row[:3] == ["1", "–", f"{expected:.6g}"]


def test_a_crash_comes_again(replay: Replay) -> None:
    capsule = wholly(picky(), kind="crash", error="ArithmeticError: below zero", batch=[microbatch(2), -microbatch(3)])
    code, text = replay(capsule, model=f"{HERE}:picky")
    assert code == 0
    assert "reproduced: rank 1, lane 3 raises ArithmeticError: below zero" in text
    code, text = replay(wholly(picky(), kind="crash", error="KeyError: 3"), model=f"{HERE}:picky")
    assert code == 1


def test_rows_that_all_raise_something_else_tell_nothing(replay: Replay) -> None:
    """Though the input is not finite, nothing was run; a loss that does not fit the microbatch does that."""
    spoilt = [microbatch(2) * float("nan"), microbatch(3)]
    code, text = replay(wholly(net(), batch=spoilt), model=f"{HERE}:net", loss=f"{HERE}:squares")
    assert code == 2
    assert "inconclusive: no forward could be run; rank 0, lane 0 raises ValueError" in text
    assert "reproduced" not in text
    assert "in lanes, what model.lanes() yielded, and otherwise the tuple of forward's arguments" in text


def test_what_was_raised_in_backward_may_not_be_known(replay: Replay) -> None:
    capsule = wholly(Fragile(), kind="crash", error="backward raised")
    code, text = replay(capsule, model=f"{HERE}:Fragile")
    assert code == 0 and "reproduced: rank 0, lane 0 raises RuntimeError: fragile" in text
    code, text = replay(wholly(picky(), kind="crash", error="backward raised"), model=f"{HERE}:picky")
    assert code == 1 and "nothing was raised; the capsule holds the microbatches as passed to your loop" in text
    batch = [microbatch(2), -microbatch(3)]
    code, text = replay(wholly(picky(), kind="crash", error="backward raised", batch=batch), model=f"{HERE}:picky")
    assert code == 1 and "raises something else: ArithmeticError" in text


class Fragile(nn.Linear):
    """Its gradients cannot be had; and it has state that no capsule holds."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def fail(grad: torch.Tensor) -> None:
            raise RuntimeError("fragile")

        out = super().forward(x)
        out.register_hook(fail)
        return out


def test_every_micro_of_a_rank_is_run(replay: Replay) -> None:
    given = [microbatch(number) for number in range(2)]
    given[1][0, 0] = float("nan")
    entries: list[dict[str, Any]] = [{"args": (one,), "kwargs": {}, "rng": None} for one in given]
    plain = wholly(net(), lanes=(), others=(), batch=entries)
    code, text = replay(plain, model=f"{HERE}:net")
    assert code == 0
    assert "reproduced: rank 1, microbatch 1: not finite, first in input: 1 × NaN" in text


def test_a_step_that_differs_by_itself_explains_a_divergence(replay: Replay) -> None:
    code, text = replay(wholly(unsteady(), kind="divergence"), model=f"{HERE}:unsteady")
    assert code == 0
    assert "rank 0, lane 0 gives different bits when it is run again, first in the gradient of 0.weight" in text
    code, text = replay(wholly(net(), kind="divergence"), model=f"{HERE}:net")
    assert code == 1
    assert "every lane gives the same bits when it is run twice" in text


def test_digests_tell_what_the_ranks_held(replay: Replay) -> None:
    model = net()
    mine = state_digest([model.state_dict()["0.weight"]])
    digests = {"0.weight": [mine + 1, mine], "0.bias": [5, 5]}
    code, text = replay(wholly(model, kind="divergence", settings={"words": digests}), model=f"{HERE}:net")
    assert code == 0
    assert "0.weight: rank 0:" in text and "; rank 1:" in text
    assert "0.bias" not in text


def test_the_trainers_model_is_known(replay: Replay) -> None:
    config = TrainConfig(size="nano", dropout=0.1)
    model = GPT(config.shape, 300, dropout=config.dropout)
    with torch.no_grad():
        model.blocks[1].down.weight[3, 5] = float("nan")  # type: ignore[operator,union-attr]
    tokens = torch.randint(300, (2, 2, 65), generator=torch.Generator().manual_seed(0))
    microbatches = [[(text[:, :-1], text[:, 1:])] for text in tokens]
    settings = {"train": {"size": "nano", "dropout": 0.1, "no_longer_known": 1}}
    capsule = wholly(model, settings=settings, batch=[microbatches[0], microbatches[0]], others=())
    code, text = replay(capsule)
    assert code == 0, text
    assert "first in blocks.1.down.weight, before the step: 1 × NaN" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "expected --model module:function"),
        ({"model": "nothing"}, "expected module:function"),
        ({"model": f"{HERE}:nobody"}, "cannot be loaded"),
        ({"model": f"{HERE}:HERE"}, "expected a function, got str"),
        ({"model": f"{HERE}:microbatch"}, "microbatch: the function raised TypeError"),
        ({"model": f"{HERE}:picky"}, "does not match the model in the capsule"),
        ({"model": f"{HERE}:net", "loss": f"{HERE}:not_a_loss"}, "expected a tensor with one number, got str"),
        ({"model": f"{HERE}:net", "device": "tpu"}, "--device tpu: expected cpu or cuda"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line(replay: Replay, more: dict[str, Any], words: str) -> None:
    code, text = replay(wholly(net()), **more)
    assert code == 2
    assert words in text


def test_files_that_are_no_capsules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").write_bytes(b"nothing")
    assert main(tmp_path / "b") == 2
    assert main(tmp_path / "c") == 2
    assert "is not an intact failure capsule" in capsys.readouterr().err


def test_what_a_replica_wrote_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(transport: Transport) -> None:
        agreement = Agreement(not_finite="skip", capsules=tmp_path)
        model = DDP(net(), transport=transport, lanes=4, seed=7, agreement=agreement)
        for step in range(3):
            microbatches = [microbatch(10 * step + lane) for lane in model.own_lanes]
            if step == 2 and transport.rank == 1:
                microbatches[1][0, 0] = float("nan")
            for x in model.lanes(microbatches, step):
                model(x).mean().backward()
            model.zero_grad()

    run(train, 2)
    (file,) = tmp_path.iterdir()
    assert main(file, f"{HERE}:net") == 0
    text = capsys.readouterr().out
    assert "not-finite in step 2" in text
    assert "reproduced: rank 1, lane 3: not finite, first in input: 1 × NaN" in text
