"""The simulation of large jobs: against what others have published, against formulas, and as a command."""

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from paceline.memory_plan.numbers import PlanError
from paceline.simulate.assumptions import SOURCES, SimulationSettings
from paceline.simulate.simulated_job import Outcome, Way, save_interval_s, simulate
from paceline.simulate.simulation import Simulation

META = 24 / 1.8 / 16.384  # failures per 1,000 ranks and day: 1.8 h between failures on 16,384 (arXiv 2410.21680)


def jobs(way: Way, ranks: int, **settings: Any) -> list[Outcome]:
    made = SimulationSettings(ranks=str(ranks), **settings)
    return [simulate(made, ranks, way, number) for number in range(made.jobs)]


def goodput(way: Way, ranks: int, **settings: Any) -> float:
    return fmean(job.goodput for job in jobs(way, ranks, **settings))


# ---- what is published


def test_llama_3() -> None:
    """419 failures in 54 days on 16,384 GPUs, at most 19 minutes lost in each, more than 90 % effective."""
    found = jobs(Way.RESTART, 16_384, days=54.0, jobs=20)
    assert fmean(job.failures for job in found) == pytest.approx(419, rel=0.05)
    assert fmean(job.goodput for job in found) > 0.90
    lost_s = sum(job.wall_s - job.useful_s for job in found) / sum(job.failures for job in found)
    assert lost_s < 19 * 60


def test_meta_research_clusters() -> None:
    """From 1.8 hours at 16,384 GPUs follow the 14 minutes that were projected at 131,072."""
    made = SimulationSettings(ranks="131072", failures=META)
    assert 1 / made.failures_per_second(131_072) / 60 == pytest.approx(14, abs=0.6)


def test_stalls_at_100_000_gpus() -> None:
    """arXiv 2602.00277: stalls of 10 minutes leave 44 % of the time, and stalls of 3 minutes 80 %. The failures are
    those of Meta's clusters, and a checkpoint costs 30 s."""
    shared: dict[str, Any] = {"failures": META, "detect": 0.0, "save": 30.0, "spares": 3.0}
    assert goodput(Way.RESTART, 100_000, restart=600.0, **shared) == pytest.approx(0.44, abs=0.04)
    three_minutes: dict[str, Any] = {"reform": 180.0, "reform_per_1000": 0.0, "heal": 0.0, **shared}
    worst = goodput(Way.MEMORY, 100_000, **three_minutes)
    best = goodput(Way.MEMORY, 100_000, all_fail=0.0, **three_minutes)
    assert worst < 0.80 < best < 0.86


def test_byterobust() -> None:
    """97 % on 9,600 GPUs, with spares that wait and checkpoints in memory: between our two ways."""
    assert goodput(Way.RESTART, 9_600, days=90.0) < 0.97 < goodput(Way.MEMORY, 9_600, days=90.0)


# ---- what must hold


def test_without_failures_nothing_is_lost() -> None:
    for way in Way:
        assert goodput(way, 1_000, failures=0.0) == 1.0


@pytest.mark.parametrize("every", [5.0, 20.0, 60.0])
def test_restarts_cost_what_the_formula_says(every: float) -> None:
    """Where failures are rare: the saves, and for each failure the restart and half the time between checkpoints."""
    settings: dict[str, Any] = {"failures": 0.05, "days": 300.0, "save_every": every, "spares": 50.0, "jobs": 8}
    made = SimulationSettings(ranks="10000", **settings)
    rate = made.failures_per_second(10_000)
    expected = made.save / (every * 60) + rate * (made.detect + made.restart + every * 60 / 2)
    assert 1 - goodput(Way.RESTART, 10_000, **settings) == pytest.approx(expected, rel=0.12)


def test_where_the_time_went_adds_up() -> None:
    for way in Way:
        for job in jobs(way, 65_536):
            # What is redone was trained before at the speed of that moment.
            parts = job.useful_s + job.stalled_s + job.redone_s + job.saving_s + job.slower_s
            assert parts == pytest.approx(job.wall_s)


def test_the_interval_that_costs_least() -> None:
    made = SimulationSettings(ranks="16384")
    best = save_interval_s(made, 16_384, Way.RESTART)
    assert best == pytest.approx(math.sqrt(2 * made.save / made.failures_per_second(16_384)))
    assert save_interval_s(made, 16_384, Way.MEMORY) > best, "fewer failures need a checkpoint"
    at_best = goodput(Way.RESTART, 16_384)
    for factor in (0.25, 4.0):
        assert goodput(Way.RESTART, 16_384, save_every=best * factor / 60) < at_best


def test_fewer_lanes_make_a_missing_rank_dearer() -> None:
    few, many = (goodput(Way.MEMORY, 4_096, spares=0.0, lanes_per_rank=lanes) for lanes in (1, 8))
    assert few < many - 0.1


def test_equal_settings_give_equal_figures() -> None:
    assert str(Simulation.run(SimulationSettings())) == str(Simulation.run(SimulationSettings()))
    other = Simulation.run(SimulationSettings(seed=1)).sizes[2].restart
    assert other != Simulation.run(SimulationSettings()).sizes[2].restart


def test_every_assumption_is_shown_with_its_source() -> None:
    text = str(Simulation.run(SimulationSettings(ranks="1000", restart=300.0)))
    for name in SOURCES:
        assert f"--{name.replace('_', '-')} " in text
    line = next(line for line in text.splitlines() if "--restart" in line)
    assert line.split() == ["--restart", "300", "given"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks": "many"}, "ranks='many': expected whole numbers above 0"),
        ({"ranks": "8"}, "expected more ranks than node=8, got 8"),
        ({"days": 0.0}, "days=0.0: expected 0.01 to 3650"),
        ({"all_fail": 1.5}, "all_fail=1.5: expected 0 to 1"),
    ],
)
def test_what_cannot_be_simulated(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        SimulationSettings(**settings)


# ---- the command

PROGRAM = """
import sys
from paceline.cli import main

try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""


def test_the_command_loads_no_torch_and_writes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "jobs.json"), "--png", str(tmp_path / "jobs.png")]
    command = [sys.executable, "-c", PROGRAM, "simulate", "--ranks", "1000,16384", "--jobs", "2", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "16,384" in done.stdout and "This follows from:" in done.stdout
    found = json.loads((tmp_path / "jobs.json").read_text())
    assert [size["ranks"] for size in found["sizes"]] == [1000, 16384]
    assert found["sizes"][1]["memory"]["goodput"] > found["sizes"][1]["restart"]["goodput"]
    assert (tmp_path / "jobs.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line() -> None:
    command = [sys.executable, "-c", PROGRAM, "simulate", "--ranks", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "paceline simulate: ranks='4': expected more ranks than node=8, got 4"
