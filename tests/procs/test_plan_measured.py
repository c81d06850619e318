"""A plan beside what a real process takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.memory_plan.measured import Peak
from paceline.memory_plan.states import PlanError

ROOT = Path(__file__).parents[2]
MIB = 2**20


@pytest.mark.timeout(150)
@pytest.mark.parametrize("batch", [2, 8])
def test_the_plan_is_within_a_tenth_of_what_tensors_take(batch: int) -> None:
    """Every block is mapped by itself here: the holes in malloc's heap differ by a tenth from run to run."""
    shape = {"vocabulary": 2048, "width": 256, "layers": 4, "heads": 4, "context": 128}
    case = json.dumps([{"name": "small", **shape, "batch": batch}, "cpu", "float32", "auto"])
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_check.py"), "--one", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    without_holes = result["planned_bytes"] - result["lines"]["holes in malloc's heap"]
    assert without_holes == pytest.approx(result["measured_bytes"], rel=0.10)
    assert result["closed_form_bytes"] == pytest.approx(result["planned_bytes"], rel=0.02)


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
