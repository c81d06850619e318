"""Ranks that a reaper starts, at any time and as often as asked, with descriptors that travel with the request."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.launch.rank_processes import RankExited, RankProcesses, RankStarted

PATIENCE_S = 20.0


@pytest.fixture
def processes() -> Iterator[RankProcesses]:
    with closing(RankProcesses()) as ranks:
        yield ranks


def next_events(processes: RankProcesses, count: int) -> list[RankStarted | RankExited]:
    until, found = time.monotonic() + PATIENCE_S, processes.events()
    while len(found) < count and time.monotonic() < until:
        select.select([processes], [], [], 0.1)
        found += processes.events()
    assert len(found) == count
    return found


def next_event(processes: RankProcesses) -> RankStarted | RankExited:
    return next_events(processes, 1)[0]


def start(processes: RankProcesses, rank: int, code: str, **more: str) -> int:
    """Start a rank that waits for a byte in the pipe ASK before it exits. Returns our end of that pipe."""
    theirs, ours = os.pipe()
    wait = "import os; ask = int(os.environ['ASK'].partition(':')[0]); os.read(ask, 1); "
    with Path(os.devnull).open("w") as null:
        processes.start(
            rank,
            [more.get("program", sys.executable), "-c", wait + code],
            dict(os.environ),
            out=null.fileno(),
            err=null.fileno(),
            named={"ASK": theirs},
        )
    os.close(theirs)
    return ours


def test_a_rank_can_be_started_again_while_others_run(processes: RankProcesses) -> None:
    asks = {rank: start(processes, rank, f"os._exit({rank})") for rank in (0, 5)}
    first, other = next_events(processes, 2)
    assert isinstance(first, RankStarted) and isinstance(other, RankStarted)
    assert processes.living == {first.rank: first.pid, other.rank: other.pid}
    for _ in range(2):
        os.write(asks[5], b"x")
        assert next_event(processes) == RankExited(5, code=5)
        os.close(asks[5])
        asks[5] = start(processes, 5, "os._exit(5)")
        again = next_event(processes)
        assert isinstance(again, RankStarted) and again.rank == 5
    processes.signal(signal.SIGKILL, 5)
    assert next_event(processes) == RankExited(5, killed_by=signal.SIGKILL)
    assert list(processes.living) == [0]
    for ask in asks.values():
        os.close(ask)


def test_a_program_that_does_not_exist_never_starts(processes: RankProcesses) -> None:
    os.close(start(processes, 0, "", program="no-such-program"))
    event = next_event(processes)
    assert isinstance(event, RankExited)
    assert (event.rank, event.code) == (0, 127)
    assert "no-such-program" in event.never
    assert processes.living == {}


def test_ranks_that_a_dead_reaper_took_along_are_named_and_later_requests_do_no_harm(processes: RankProcesses) -> None:
    ask = start(processes, 1, "os._exit(0)")
    started = next_event(processes)
    assert isinstance(started, RankStarted)
    parent = int(Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert next_event(processes) == RankExited(1, killed_by=signal.SIGKILL, with_reaper=True)
    assert processes.reaper_died
    assert processes.unkillable == []
    processes.signal(signal.SIGTERM)
    assert processes.events() == []
    os.close(ask)
