"""What is kept beside the newest snapshots: milestones, and the best so far."""

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import Checkpointer, NoCheckpoint
from paceline.errors import UsageError


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def save(directory: Path, metrics: dict[int, float | None], **options: Any) -> Checkpointer:
    with Checkpointer(directory, asynchronous=False, **options) as checkpointer:
        for step, metric in metrics.items():
            assert checkpointer.save(step, metric=metric, note=step).problem is None
    return checkpointer


def test_the_first_of_every_thousand_steps_is_kept(tmp_path: Path) -> None:
    save(tmp_path, dict.fromkeys(range(0, 4400, 300)), keep_every=1000)
    assert steps(tmp_path) == [1200, 2100, 3000, 3900, 4200]
    save(tmp_path, dict.fromkeys([4500, 5000, 5100, 5200]), keep_every=1000)
    assert steps(tmp_path) == [1200, 2100, 3000, 4200, 5000, 5100, 5200]


@pytest.mark.parametrize(("best", "expected"), [("min", 30), ("max", 20)])
def test_the_best_so_far_is_kept_and_can_be_loaded(tmp_path: Path, best: Any, expected: int) -> None:
    metrics = {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.5, 50: float("nan"), 60: None, 70: 0.4}
    checkpointer = save(tmp_path, metrics, best=best)
    assert steps(tmp_path) == [expected, 60, 70]
    assert checkpointer.load("best").more["note"] == expected
    assert checkpointer.load().step == 70
    save(tmp_path, {80: 0.9 if best == "max" else 0.1}, best=best)
    assert steps(tmp_path) == [70, 80], "the newest of two that are equally good"


def test_a_best_one_that_is_damaged_is_not_replaced_by_another(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, {10: 0.1, 20: 0.5, 30: 0.6})
    file = tmp_path / "step-00000010" / "state.json"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    with pytest.raises(NoCheckpoint, match=r"step-00000010.*state\.json has changed"):
        checkpointer.load("best")
    with pytest.raises(NoCheckpoint, match="there is no checkpoint in"):
        save(tmp_path / "other", {1: None}).load("best")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"keep_every": 0}, "keep_every must be a whole number of at least 1, or None, got 0"),
        ({"best": "least"}, "best must be 'min' or 'max', got 'least'"),
    ],
)
def test_what_cannot_be_kept(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        Checkpointer(tmp_path, **options)
