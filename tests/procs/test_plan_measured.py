"""A plan beside what a real process takes."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_check import Case, planned
from benchmarks.rank_processes import run_ranks
from paceline.memory_plan.measured import Peak
from paceline.memory_plan.numbers import PlanError

ROOT = Path(__file__).parents[2]
MIB = 2**20


SMALL = Case("small", vocabulary=2048, width=256, layers=4, heads=4, context=128, batch=2)
MEDIUM = Case("63m", vocabulary=8192, width=768, layers=7, heads=8, context=64, batch=2)


def measured(case: Case, ranks: int) -> dict[str, Any]:
    (found,) = run_ranks(str(ROOT / "benchmarks" / "plan_check.py"), ranks, [asdict(case)])
    return {**found, **planned(case, ranks)}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("batch", [2, 8])
def test_the_plan_is_within_a_tenth_of_what_tensors_take(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is mapped by itself here: the holes in malloc's heap differ by a tenth from run to run."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "1000000")
    result = measured(replace(SMALL, batch=batch), 1)
    without_holes = result["planned_bytes"] - result["lines"]["holes in malloc's heap"]
    assert without_holes == pytest.approx(result["measured_bytes"], rel=0.10)
    assert result["closed_form_bytes"] == pytest.approx(result["planned_bytes"], rel=0.02)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3"])
def test_the_plan_of_a_placement_is_near_what_a_rank_takes(placement: str) -> None:
    """62 million parameters on two ranks: 0.8 to 1.1 GiB each."""
    result = measured(replace(MEDIUM, placement=placement), 2)
    assert result["measured_bytes"] > 500 * MIB
    assert result["planned_bytes"] == pytest.approx(result["measured_bytes"], rel=0.10)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_what_ranks_exchange_over_gloo_is_counted(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the parameters, or the gradients, under zero1. Without holes, as above."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "1000000")
    result = measured(replace(MEDIUM, placement=placement, transport="torch"), 2)
    without_holes = result["planned_bytes"] - result["lines"]["holes in malloc's heap"]
    assert without_holes == pytest.approx(result["measured_bytes"], rel=0.05)


def test_a_peak_is_seen_after_the_memory_is_gone() -> None:
    peak = Peak("cpu")
    held = bytearray(64 * MIB)
    del held
    assert peak.nbytes() == pytest.approx(64 * MIB, rel=0.1)
    peak.restart()
    assert peak.nbytes() < 16 * MIB


def test_other_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="device='tpu': expected cpu or cuda"):
        Peak("tpu")
