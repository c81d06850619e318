"""`paceline doctor --determinism`: what is written down, and how two records are compared."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives.local import LocalTransport
from paceline.errors import UsageError
from paceline.replica import recording
from paceline.replica.recording import Recording, recording_asked
from paceline.replica.recording_diff import compare
from tests.models import DDP, mlp, seeded

Lines = list[dict[str, Any]]


class Ended(BaseException):
    """In the place of the end of the process."""


def end() -> None:
    raise Ended


class Own(nn.Module):
    """Draws from a generator of its own, which the clock has seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(time.time_ns())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.source)


def net(middle: Callable[[], nn.Module] = lambda: nn.Dropout(0.5)) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 8), middle(), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def record(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module] = net,
    lanes: int | None = 3,
    *,
    steps: int = 2,
    first: int = 0,
    data: Callable[[], float] = lambda: 0.0,
    after_step: Callable[[nn.Module], None] = lambda _: None,
) -> Lines:
    """What a script that trains such a model would write."""
    monkeypatch.setenv("PACELINE_DETERMINISM", str(file))
    monkeypatch.setenv("PACELINE_DETERMINISM_STEPS", str(steps))
    monkeypatch.setattr(recording, "end_process", end)
    model = DDP(make(), transport=LocalTransport(), lanes=lanes, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        for step in range(first, first + 1000):
            microbatches = [torch.full((5, 4), 1.0 + step + lane + data()) for lane in range(lanes or 1)]
            for x in model.lanes(microbatches, step) if lanes else microbatches:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(model)

    with pytest.raises(Ended):
        train()
    return [json.loads(line) for line in file.read_text().splitlines()]


Twice = Callable[..., tuple[int, str]]


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Twice:
    def twice(**more: Any) -> tuple[int, str]:
        one, two = (record(tmp_path / name, monkeypatch, **more) for name in ("one", "two"))
        (tmp_path / "one").unlink()
        (tmp_path / "two").unlink()
        code, said = compare(one, two, "train.py")
        return code, "\n".join(said)

    return twice


def test_lanes_seed_dropout_so_a_plain_model_gives_the_same_bits(twice: Twice) -> None:
    code, text = twice()
    assert code == 0
    assert "train.py gives the same bits twice in the first 2 steps of 3 lanes: 30 outputs of modules, 36 " in text
    assert "deterministic algorithms: " in text and "threads: " in text


@pytest.mark.parametrize("lanes", [3, None])
def test_a_module_with_a_generator_of_its_own_is_named(twice: Twice, lanes: int | None) -> None:
    code, text = twice(make=lambda: net(Own), lanes=lanes)
    assert code == 1
    where = "step 0, lane 0" if lanes else "step 0"
    assert f"DIFFER first in the output of 1 (Own), {where}; everything before it is equal" in text
    assert "draws" in text


def test_dropout_without_lanes_needs_a_seed(twice: Twice) -> None:
    code, text = twice(lanes=None)
    assert code == 1
    assert "the output of 1 (Dropout), step 0" in text and "torch.manual_seed" in text


def test_weights_data_and_optimizers_that_differ_are_told_apart(twice: Twice) -> None:
    def noise(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(time.time_ns() % 1000003)

    def start() -> nn.Module:
        model = net()
        noise(model)
        return model

    for first in (0, 500):  # as in a resumed run
        code, text = twice(make=start, first=first)
        assert code == 1
        assert f"the weights of 0.weight at the start, step {first}" in text and "before it is built" in text
    code, text = twice(data=lambda: time.time_ns() % 1000003)
    assert code == 1
    assert "input 0 (Tensor), step 0, lane 0" in text and "seed the order" in text
    code, text = twice(after_step=noise)
    assert code == 1
    assert "the weights of 0.weight at the start, step 1" in text and "the optimizer" in text


def test_a_kernel_of_backward_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = record(tmp_path / "a", monkeypatch)
    other = [dict(line) for line in lines]
    place = next(number for number, line in enumerate(lines) if line["kind"] == "gradient")
    other[place]["digest"] += 1
    code, said = compare(lines, other, "train.py")
    assert code == 1
    assert "DIFFER first in the gradient of 3.bias, step 0, lane 0" in said[0] and "kernel of backward" in said[1]


def test_runs_that_call_other_modules_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = record(tmp_path / "a", monkeypatch)
    place = next(number for number, line in enumerate(lines) if line["kind"] == "output")
    code, said = compare(lines, lines[:place] + lines[place + 1 :], "train.py")
    assert code == 1
    assert (
        "the first run continued with the output of 0 (Linear), step 0, lane 0, the second with the output of 1"
        in said[0]
    )
    code, said = compare(lines, lines[:place], "train.py")
    assert code == 1
    assert "the second with nothing more" in said[0]


def test_replicas_are_numbered_and_a_script_may_end_early(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for _ in range(2):
        model = mlp(4, 3)
        Recording(file, model, None, steps=5)
        model(torch.ones(2, 4)).sum().backward()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["replica"] for line in lines} == {0, 1}
    assert compare(lines, lines, "x.py")[0] == 0


def test_sparse_gradients_are_read_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    model = nn.Embedding(9, 2, sparse=True)
    Recording(tmp_path / "a", model, None, steps=5)
    model(torch.tensor([3, 3, 1])).sum().backward()
    (line,) = [json.loads(x) for x in (tmp_path / "a").read_text().splitlines() if '"gradient"' in x]
    assert line["digest"] is not None


def test_nothing_is_recorded_unless_asked() -> None:
    assert recording_asked(mlp(2, 2), None, {}) is None
    with pytest.raises(UsageError, match="PACELINE_DETERMINISM_STEPS='0': expected a whole number"):
        recording_asked(mlp(2, 2), None, {"PACELINE_DETERMINISM": "x", "PACELINE_DETERMINISM_STEPS": "0"})
