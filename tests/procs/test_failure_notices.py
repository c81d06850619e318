"""What ends a rank by an exception is told to all others, with its traceback, also when the rank holds the store."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import signal, sys, time, torch, paceline

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # on a busy machine the launcher is sooner
world = paceline.init(device="cpu")
failing, transport = int(sys.argv[1]), sys.argv[2]
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4), transport=transport)


def mine(step):
    if step == 3 and world.rank == failing:
        print("failed at", time.monotonic(), flush=True)
        raise KeyError("of my own")


try:
    for step in range(5):
        mine(step)
        model(torch.ones(2, 4)).sum().backward()
except paceline.errors.PeerLost as error:
    print("told at", time.monotonic(), flush=True)
    raise
"""


@pytest.mark.alone
@pytest.mark.parametrize(("failing", "transport"), [(1, "torch"), (0, "shm")])
def test_the_error_of_a_rank_reaches_the_others(tmp_path: Path, failing: int, transport: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", "3", "--log-dir", str(tmp_path / "runs"), str(script)]
    done = subprocess.run(
        [*command, str(failing), transport],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1
    assert f"paceline run: rank {failing} raised KeyError: 'of my own'\n" in done.stderr
    logs = {rank: next((tmp_path / "runs").glob(f"*/rank_{rank}.log")).read_text() for rank in range(3)}
    (failed_at,) = stamps("failed at", logs[failing])
    for rank in {0, 1, 2} - {failing}:
        log = logs[rank]
        (told_at,) = stamps("told at", log)
        assert told_at - failed_at < 1.0, "the clock is one for all processes of the machine"
        assert f"PeerLost: rank {failing} " in log
        notice = log[log.index(f"What ended rank {failing}:") :]
        assert "| KeyError: 'of my own'" in notice and "in mine" in notice and "told at" in log


def test_the_launcher_is_told_before_a_process_that_takes_long_to_end_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import atexit, time\natexit.register(time.sleep, 3)\n" + SCRIPT)
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", "2", "--log-dir", str(tmp_path / "runs"), str(script)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "1", "torch"], capture_output=True, text=True, timeout=55, env=environ, check=False
    )
    early = done.stderr.index("paceline run: rank 1 raised KeyError: 'of my own', and is about to end\n")
    assert early < done.stderr.index("paceline run: rank 1 raised KeyError: 'of my own'\n")


def stamps(what: str, log: str) -> list[float]:
    """When a rank has said so."""
    return [float(stamp) for stamp in re.findall(rf"^{what} ([\d.]+)$", log, re.MULTILINE)]
