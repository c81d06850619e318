"""`scripts/chaos` runs jobs, sees what becomes of them, and says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"


@pytest.mark.alone  # a death has to be named within a second
@pytest.mark.timeout(150)
def test_a_rank_is_killed_and_the_row_holds(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "F2", "--no-tests", "--ways", "restart", "--out", str(tmp_path / "seen")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((tmp_path / "seen.json").read_text())["rows"]["F2"]["restart"]
    assert row["misses"] == [] and set(row["seen"]["digests"]) == {row["quiet"]["digest"]}
    assert row["seen"]["named_s"] is not None and row["seen"]["back_s"] is not None
    assert "rank 1 was killed by SIGKILL" in row["seen"]["said"]
    assert "| F2 | SIGKILL of a rank |  |  | holds: finished, named " in (tmp_path / "seen.md").read_text()


def test_rows_that_there_are_not_are_refused() -> None:
    done = subprocess.run([sys.executable, str(CHAOS), "F99"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is no row F99; expected some of F1, F2" in done.stderr
