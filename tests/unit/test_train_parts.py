"""Parts of the trainer that need no ranks: the model, the rate, the page, the trackers, the sparkline."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.cli.train_output import program, sparkline
from paceline.errors import UsageError
from paceline.train import trackers
from paceline.train.config import TrainConfig
from paceline.train.model import GPT
from paceline.train.optimizer import jump_at, matrices_and_vectors, rate_at
from paceline.train.run_folder import RunFolder
from paceline.train.run_report import facts, write_picture, write_report
from paceline.train.sizes import SIZES
from paceline.train.trackers import open_trackers

RESULT = {
    "ended": "finished",
    "steps": 3,
    "own_steps": 2,
    "ranks": 2,
    "lanes": 8,
    "placement": "ddp",
    "shard": 0,
    "seconds": 1.5,
    "parameters": 1000,
    "source": "a <text>",
    "held_out_per_byte": 2.0,
    "tokens_per_second": 1e4,
    "step_seconds": 0.1,
    "overlap": 0.9,
    "exposed_seconds": 0.01,
    "gradient_difference": 1e-8,
    "memory_planned": 2**20,
    "memory_measured": 2**21,
    "resumed_from": 1,
    "redone_steps": 2,
    "digest": "ab",
    "date": "2026-01-02 03:04:05 +0000",
    "machine": "a <CPU>, 2 cores",
    "versions": "paceline 1, torch 2, python 3",
    "sample": "<b>not bold</b>",
}


def test_the_size_gpt2_has_the_parameters_of_gpt2() -> None:
    with torch.device("meta"):
        net = GPT(SIZES["gpt2"], 50257)
    assert sum(p.numel() for p in net.parameters()) == 124_439_808
    matrices, vectors = matrices_and_vectors(net)
    assert len(matrices) + len(vectors) == len(list(net.parameters()))


def test_recomputed_activations_give_the_same_gradients() -> None:
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        net = GPT(SIZES["nano"], 256, checkpointing=checkpointing)
        net(tokens, tokens).backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_token_sees_no_later_one() -> None:
    net = GPT(SIZES["nano"], 256).eval()
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        assert torch.equal(net(tokens)[0, :20], net(changed)[0, :20])


def test_the_rate_rises_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    rates = [rate_at(step, config) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=0.01)
    longer = replace(config, steps=200, decay_steps=100)
    assert [rate_at(step, longer) for step in range(200)] == rates + [pytest.approx(0.1)] * 100


def test_a_rate_that_jumps_is_told() -> None:
    config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate_at(99, config))
    assert jump_at(100, optimizer, replace(config, steps=200, decay_steps=100)) is None
    before, after = jump_at(100, optimizer, replace(config, steps=200)) or (0.0, 0.0)
    assert before == pytest.approx(0.1, abs=0.01) and after == pytest.approx(0.6, abs=0.05)


@pytest.mark.usefixtures("fonts")
def test_the_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    folder = RunFolder.prepare(TrainConfig(out=str(tmp_path / "run")))
    folder.release()
    folder.metrics_file.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "held_out": 2.5}\n')
    folder.write_result(RESULT)
    assert write_picture(folder) is (find_spec("matplotlib") is not None)
    write_report(folder)
    page = folder.report_file.read_text()
    assert "&lt;b&gt;not bold" in page and "a &lt;text&gt;" in page
    assert '<meta name="viewport"' in page
    assert f"ranks = {RESULT['ranks']} " in page, "the number that ran, where the setting leaves it to the machine"
    for line in (RESULT["date"], "a &lt;CPU&gt;, 2 cores", RESULT["versions"]):
        assert str(line) in page
    assert "src=" not in page.replace('src="data:', "") and "href" not in page
    assert ("resumed", "from step 1; 2 steps repeated") in facts(RESULT)


def test_trackers_are_known_by_name_and_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'paper' is not known; expected some of tensorboard, wandb"):
        open_trackers(TrainConfig(trackers="paper"), tmp_path)
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"trackio is not installed: pip install trackio"):
        open_trackers(TrainConfig(trackers="trackio"), tmp_path)
    open_trackers(TrainConfig(), tmp_path).log({"loss": 1.0}, 1)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    opened = open_trackers(replace(TrainConfig(), trackers="tensorboard"), tmp_path)
    opened.log({"loss": 1.5}, 3)
    opened.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


class Flaky:
    """A tracker that raises at the steps it is given, and when it is closed."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.asked: list[int] = []

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.asked.append(step)
        if step in self.bad:
            raise ConnectionError(f"the server is away at step {step}")

    def close(self) -> None:
        raise OSError("nor can it be closed")


def no_tracker() -> trackers.Tracker:
    raise PermissionError("no key")


def test_a_tracker_that_raises_is_reported_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sound, flaky, broken = Flaky(), Flaky(2, 4, 5), Flaky(*range(10))
    opened = trackers.Trackers(
        {
            "none": no_tracker,
            "sound": lambda: trackers.Tracker(sound.log, sound.close),
            "flaky": lambda: trackers.Tracker(flaky.log, flaky.close),
            "broken": lambda: trackers.Tracker(broken.log, broken.close),
        }
    )
    for step in range(10):
        opened.log({"loss": 1.0}, step)
    opened.close()
    assert sound.asked == flaky.asked == list(range(10)), "one that works again is used again"
    assert broken.asked == list(range(trackers.FAILURES)), "one that only fails is left alone"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    for name, what in (
        ("none", "could not be started (PermissionError: no key)"),
        ("broken", "failed at step 0 (ConnectionError: the server is away at step 0)"),
        ("flaky", "failed at step 2 (ConnectionError: the server is away at step 2)"),
        ("sound", "could not be closed (OSError: nor can it be closed)"),
    ):
        assert any(f"the tracker {name} {what}" in line for line in said), said


def test_a_sparkline_falls_with_its_series() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60
    assert sparkline([1.0], 60) == "▁"
    assert sparkline([2.0, float("nan"), 1.0, float("inf")], 60) == "█▁"
    assert sparkline([float("nan")], 60) == ""


def test_the_commands_to_try_next_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a virtual environment that is not active
    assert program() == f"{sys.executable} -m paceline.cli"
    started = tmp_path / "bin" / "paceline"
    started.parent.mkdir()
    started.touch()
    monkeypatch.setattr(sys, "argv", [str(started), "train"])
    assert program() == str(started)
    started.chmod(0o755)
    monkeypatch.setenv("PATH", str(started.parent))
    assert program() == "paceline"
