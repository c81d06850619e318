"""What a launcher sees of ranks that nobody waits for."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from paceline.launch.rank_watch import RankWatch
from paceline.launch.reports import Mark, ProgressBoard
from paceline.launch.watchdog import STOPPED_S
from paceline.process_status import read_status


@pytest.fixture
def processes() -> Iterator[dict[int, int]]:
    """Two processes that do nothing, by rank."""
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield {rank: process.pid for rank, process in enumerate(started)}
    for process in started:
        process.kill()
        process.communicate()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not read_status(pid).stopped:
        pass


def nobody(marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
    return {}


def test_one_that_is_stopped_is_no_use_as_a_spare(processes: dict[int, int]) -> None:
    board = ProgressBoard(2)
    notes: list[str] = []
    watch = RankWatch(range(2), None, board, notes.append)
    assert watch.look(0.0, processes, nobody) is None
    stop(processes[1])
    assert watch.look(1.0, processes, nobody) is None
    assert watch.look(1.0 + STOPPED_S, processes, lambda _: None) is None  # told not to look at all
    hang = watch.look(1.0 + STOPPED_S, processes, nobody)
    assert hang is not None
    assert (hang.ranks, hang.reason) == ((1,), "stopped for 4 s (process state T)")
    stop(processes[0])
    assert watch.look(20.0, processes, nobody) is None  # all of them: somebody pauses the job
    board.close()
    assert notes == []
