"""A rank that its launcher has given up still lives, stopped, and owns the directory of checkpoints: the next one takes
it over, and nothing that the old one does when it can run again is seen there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import saving, snapshots
from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.errors import UsageError
from paceline.rank_report import JOB_NAME
from tests.pool import Pool

PATIENCE_S = 30.0
JOB = "0123456789abcdef"
# Forks a rank for each line, which saves step 1, and stops itself where it is told to while it saves step 2. What it
# has to say about that it leaves in a file.
OLD = """
import json, os, signal, sys
from pathlib import Path
from torch import nn
import paceline
from paceline.checkpoint import saving, snapshots
from paceline.errors import UsageError


def stops(call):
    def stop(*given):
        os.kill(os.getpid(), signal.SIGSTOP)
        return call(*given)
    return stop


def old_rank(where, directory, said, job):
    os.environ.update(PACELINE_JOB=job, TORCHELASTIC_RESTART_COUNT="0")
    model = nn.Linear(2, 2)
    checkpointer = paceline.Checkpointer(directory, asynchronous=False)
    checkpointer.save(1, model=model)
    if where == "before it begins":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif where == "before it has a folder":
        snapshots.remove_abandoned = stops(snapshots.remove_abandoned)
    else:
        saving.Save._check = stops(saving.Save._check)
    try:
        text = str(checkpointer.save(2, model=model).problem)
    except UsageError as error:
        text = str(error)
    Path(said).write_text(text)


for line in sys.stdin:
    if (pid := os.fork()) == 0:
        old_rank(*json.loads(line))
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def old_ranks() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", OLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


class OldRank:
    """A rank of the first attempt of a job, stopped where it is told to."""

    def __init__(self, parent: "subprocess.Popen[str]", where: str, folder: Path, job: str) -> None:
        self._parent = parent
        self._said = folder / "said"
        self.directory = folder / "checkpoints"
        assert parent.stdin is not None
        parent.stdin.write(json.dumps([where, str(self.directory), str(self._said), job]) + "\n")
        parent.stdin.flush()
        self.pid = int(self._read())
        until = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.01)

    def _read(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline()

    def go_on(self) -> str:
        """What it says of its save when it can run again."""
        os.kill(self.pid, signal.SIGCONT)
        assert self._read() == "ended\n"
        return self._said.read_text()


@pytest.fixture
def second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_NAME, JOB)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


@pytest.mark.parametrize("where", ["before it begins", "before it has a folder", "before it gives it its name"])
def test_what_a_rank_that_was_given_up_writes_is_not_seen(
    where: str, old_ranks: Any, tmp_path: Path, second_attempt: None
) -> None:
    old = OldRank(old_ranks, where, tmp_path, JOB)
    with paceline.Checkpointer(old.directory) as checkpointer:
        checkpointer.save(5, model=nn.Linear(2, 2))
        checkpointer.wait()
        told = old.go_on()
        assert told.startswith(("rank 0 cannot save to", "rank 0: the checkpoint of step 2 could not be written")), told
        assert not (old.directory / "step-00000002").exists()
        checkpointer.save(6, model=nn.Linear(2, 2))
        checkpointer.wait()
        found = checkpointer.latest()
        assert found is not None and found.step == 6
    assert sorted(path.name for path in old.directory.iterdir()) == [".lock", "step-00000005", "step-00000006"]


@pytest.mark.parametrize(("job", "attempt"), [("fedcba9876543210", "1"), (JOB, "0"), ("", "1")])
def test_nobody_else_loses_the_directory(
    job: str, attempt: str, old_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_NAME, JOB)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    old = OldRank(old_ranks, "before it begins", tmp_path, job)
    with paceline.Checkpointer(old.directory) as checkpointer, pytest.raises(UsageError, match=f"process {old.pid} on"):
        checkpointer.save(5, model=nn.Linear(2, 2))
    assert old.go_on() == "None"  # it saves as if nothing had been
    assert (old.directory / "step-00000002").exists()


def leave(rank: int, size: int, directory: str) -> tuple[float, bool]:
    """Rank 1 does not write its part of a snapshot; for how long rank 0 waits for it when the group is gone."""
    done = Path(directory, "done")
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "ORPHAN_S", 0.2)
        if rank == 1:
            patch.setattr(saving.Save, "_check", lambda _: wait_for(done))
        checkpointer = paceline.Checkpointer(Path(directory, "checkpoints"))
        checkpointer.save(1, model=model)
        began = time.monotonic()
        if rank == 0:
            checkpointer.follow_group()
            checkpointer.close()
            waited_s = time.monotonic() - began
            done.touch()
        else:
            checkpointer.close()
            waited_s = 0.0
        assert checkpointer._writing is not None
        return waited_s, isinstance(checkpointer._writing.error, CheckpointError)


def wait_for(file: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_rank_of_another_group_is_not_waited_for_without_end(procs: Pool, tmp_path: Path) -> None:
    (waited_s, failed), _ = procs(2).run(leave, str(tmp_path))
    assert failed and waited_s < 5.0
    assert snapshots.listed(tmp_path / "checkpoints") == []
