"""What a launcher sees of ranks that nobody waits for."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping

import pytest

from paceline.launch.rank_processes import RankProcesses
from paceline.launch.rank_watch import RankWatch
from paceline.launch.reports import Mark, ProgressBoard
from paceline.launch.watchdog import STOPPED_S
from paceline.process_status import read_status


@pytest.fixture
def processes() -> Iterator[RankProcesses]:
    """Two ranks that do nothing."""
    with contextlib.closing(RankProcesses()) as started:
        for rank in range(2):
            started.start(rank, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, out=1, err=2)
        while not all(started.living.values()):
            started.events()
        yield started


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not read_status(pid).stopped:
        pass


def nobody(marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
    return {}


def test_one_that_is_stopped_is_no_use_as_a_spare(processes: RankProcesses) -> None:
    board = ProgressBoard(2)
    notes: list[str] = []
    watch = RankWatch(range(2), None, board, notes.append)
    assert watch.look(0.0, processes, nobody) is None
    stop(processes.living[1])
    assert watch.look(1.0, processes, nobody) is None
    assert watch.look(1.0 + STOPPED_S, processes, lambda _: None) is None  # told not to look at all
    hang = watch.look(1.0 + STOPPED_S, processes, nobody)
    assert hang is not None
    assert (hang.ranks, hang.reason) == ((1,), "stopped for 4 s (process state T)")
    stop(processes.living[0])
    assert watch.look(20.0, processes, nobody) is None  # all of them: somebody pauses the job
    board.close()
    assert notes == []
