"""`paceline run --fault`: each fault happens once in a job, and is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, paceline

world = paceline.init(device="cpu")
torch.manual_seed(0)
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
paceline.shutdown()
print("finished with", model.module.weight.sum().item())
"""


def run(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", "2", "--log-dir", str(folder / "runs"), *flags]
    return subprocess.run(
        [*command, str(folder / "script.py")],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.timeout(100)
def test_every_fault_happens_once_and_is_told(tmp_path: Path) -> None:
    faults = ("kill rank=1 step=2", "freeze rank=1 step=4 where=update seconds=0.5")
    flags = [word for fault in (*faults, "kill rank=0 step=99") for word in ("--fault", fault)]
    done = run(tmp_path, "--max-restarts", "1", *flags)
    assert done.returncode == 0, done.stderr
    for fault in faults:
        assert done.stderr.count(f"injected fault: {fault}\n") == 1, done.stderr
    assert "paceline run: rank 1 was killed by SIGKILL; restart 1: all ranks start again\n" in done.stderr
    assert "paceline run: faults that never happened: kill rank=0 step=99." in done.stderr
    assert "[0-1] finished with" in done.stdout


def test_a_fault_that_cannot_happen_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path, "--fault", "kill rank=2 step=1")
    assert done.returncode == 2
    assert "fault 'kill rank=2 step=1': there is no rank 2; expected 0 to 1, or all" in done.stderr
    assert not (tmp_path / "runs").exists()
