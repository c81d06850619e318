"""`paceline run --ranks MIN:MAX` with members that load no torch: who is lost, who goes on, and nothing is left."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("elastic_member.py")
PATIENCE_S = 40.0
Run = Callable[..., "Done"]


class Done:
    """A job that has ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out = code, out
        self.said = [line.removeprefix("paceline run: ") for line in err.splitlines()]

    def generations(self, slot: int) -> list[tuple[int, int, int]]:
        """The generations that a slot was in: number, rank, size."""
        found = re.findall(rf"^\[{slot}\] generation (\d+) rank (\d+) of (\d+)", self.out, re.MULTILINE)
        return [(int(number), int(rank), int(size)) for number, rank, size in found]

    def has(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, line) for line in self.said)


def arguments(folder: Path, faults: list[list[object]], flags: tuple[str, ...], **plan: object) -> list[str]:
    command = [sys.executable, "-m", "paceline.cli", "run", "--log-dir", str(folder / "runs"), *flags]
    return [*command, str(SCRIPT), json.dumps({"faults": faults, "end": 60, **plan})]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`run(faults, *flags, **plan)` runs a job to its end. No process of it is left then."""

    def to_the_end(faults: list[list[object]], *flags: str, **plan: object) -> Done:
        job = subprocess.run(
            arguments(tmp_path, faults, flags, **plan), capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
        )
        return Done(job.returncode, job.stdout, job.stderr)

    yield to_the_end
    assert descendants_named(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "script.py"}


def descendants_named(folder: Path) -> list[str]:
    """The command lines of living processes that were started in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                found.append((entry / "cmdline").read_text())
        except OSError:  # gone, or somebody else's
            continue
    return found


def test_rank_0_is_killed_and_the_others_live_on(run: Run) -> None:
    done = run([[0, 20, "SIGKILL"]], "--ranks", "2:3")
    assert done.code == 0, done.said
    assert done.generations(1)[:2] == [(0, 1, 3), (1, 0, 2)]
    assert done.generations(2)[:2] == [(0, 2, 3), (1, 1, 2)]
    assert done.generations(0) == [(0, 0, 3), (2, 2, 3)]
    assert done.generations(1)[2] == (2, 0, 3)
    assert done.said[0].startswith("generation 0: 3 ranks after ")
    assert done.said[1] == "rank 0 was killed by SIGKILL (at step 20)"
    assert done.has(r"generation 1: 2 ranks go on from step 20 after \d+\.\d\d s")
    assert done.has(r"generation 2: 3 ranks \(1 new\) go on from step \d+ after \d+\.\d\d s")
    assert done.has(r"1 rank was lost and 1 joined later; 3 generations, \d+\.\d\d s between them")


def test_a_spare_takes_the_place_of_the_lost_one(run: Run) -> None:
    done = run([[1, 400, "SIGKILL"]], "--ranks", "2:2", "--spares", "1", end=420, spares=1)
    assert done.code == 0, done.said
    assert done.generations(0) == [(0, 0, 2), (1, 0, 2)]
    assert done.generations(2) == [(1, 1, 2)]
    assert done.has(r"generation 1: 2 ranks \(1 new\) go on from step 400 after .*")


def test_two_are_lost_one_after_the_other(run: Run) -> None:
    done = run([[1, 20, "SIGSEGV"], [2, 25, "exit3"]], "--ranks", "1:3")
    assert done.code == 0, done.said
    assert done.has(r"rank 1 was killed by SIGSEGV \(at step 20\)")
    assert done.has(r"rank 1 \(slot 2\) exited with code 3 \(at step 25\)")
    assert done.has(r"2 ranks were lost and 2 joined later; .*")


def test_one_that_leaves_without_finishing_is_lost(run: Run) -> None:
    done = run([[1, 20, "exit0"]], "--ranks", "1:2")
    assert done.code == 0, done.said
    assert done.has(r"rank 1 exited with code 0 without having reached Elastic.finish\(\) \(at step 20\)")


def test_a_rank_that_fails_after_the_last_step_is_no_loss_and_no_success(run: Run) -> None:
    done = run([[1, "after", "exit3"]], "--ranks", "1:2", "--spares", "1", spares=1)
    assert done.code == 3
    assert "rank 1 exited with code 3" in done.said
    assert not done.has(".* lost .*")


def test_a_stopped_rank_is_ended_and_not_those_who_wait_for_it(run: Run) -> None:
    done = run([[1, 20, "SIGSTOP"]], "--ranks", "1:2", "--hang-timeout", "1")
    assert done.code == 0, done.said
    assert done.has(
        r"rank 1 froze: stopped for 1 s \(process state T\), in .*elastic_member.py:\d+ in \w+ \(at step 20\)"
    )
    assert [generation[0] for generation in done.generations(0)] == [0, 1, 2]


def test_a_step_that_fails_again_is_named_and_the_job_is_not_restarted(run: Run) -> None:
    done = run([[None, 20, "raise"]], "--ranks", "1:2", "--max-restarts", "3")
    assert done.code == 1
    assert done.has("step 20 has failed in two generations, so it is not tried again: a rank raised ValueError: .*")
    assert any("ValueError: a bad sample" in line for line in done.said)
    assert not any("restart" in line for line in done.said)


def test_too_many_losses_and_a_restart_of_all(run: Run) -> None:
    done = run([[1, 20, "SIGKILL"]], "--ranks", "1:2", "--max-losses", "0", "--max-restarts", "1")
    assert done.code == 137
    assert done.has("1 rank is lost, and at most 0 may be; restart 1: all ranks start again")
    assert done.said.count("rank 1 was killed by SIGKILL (at step 20)") == 2


def test_below_the_minimum_it_waits_and_says_for_what(run: Run) -> None:
    done = run([[1, 20, "SIGKILL"]], "--ranks", "2:2", "--recovery-timeout", "2", late=True)
    assert done.code == 137
    assert "1 rank is left of at least 2: waiting for 1 to start, for at most 2 s" in done.said
    assert done.has("1 rank is there of at least 2, for longer than 2 s; 1 did not start in that time")


def test_a_script_that_is_no_member_is_restarted_as_a_whole(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': signal.pause()\n"
    )
    flags = ("--ranks", "1:2", "--spares", "1", "--max-restarts", "1", "--log-dir", str(tmp_path / "runs"))
    job = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", *flags, str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stderr
    assert re.findall(r"attempt \d \d \d", job.stdout).count("attempt 1 1 2") == 1
    assert "attempt 1 2" not in job.stdout  # no spare: they are for members
    assert "rank 1 was killed by SIGKILL; restart 1: all ranks start again" in job.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_is_the_end_of_all(run: Run, tmp_path: Path, number: int) -> None:
    command = arguments(tmp_path, [], ("--ranks", "1:2", "--spares", "1"), end=10**9)
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert job.stdout is not None
    while "generation 0" not in job.stdout.readline():
        assert job.poll() is None
    job.send_signal(number)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    until = time.monotonic() + PATIENCE_S
    while descendants_named(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.01)


class Running:
    """A job that runs, whose lines are read as they come."""

    def __init__(self, folder: Path, faults: list[list[object]], *flags: str, **plan: object) -> None:
        command = arguments(folder, faults, flags, **plan)
        self._job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, bufsize=1
        )
        self.lines: list[str] = []

    def until(self, *texts: str) -> None:
        """Read until all of these were seen."""
        assert self._job.stdout is not None
        while not all(any(text in line for line in self.lines) for text in texts):
            line = self._job.stdout.readline()
            assert line, self.lines
            self.lines.append(line.rstrip())

    def end(self, number: signal.Signals) -> float:
        """Send a signal to the launcher, and wait for the end. Returns the seconds until then."""
        began = time.monotonic()
        self._job.send_signal(number)
        self.lines += self._job.communicate(timeout=PATIENCE_S)[0].splitlines()
        assert self._job.returncode == 143, self.lines
        return time.monotonic() - began

    @property
    def saved(self) -> dict[int, int]:
        """By slot, at which step it has saved."""
        found = [re.fullmatch(r"\[([\d,-]+)\] saved at step (\d+)", line) for line in self.lines]
        slots = {match: re.split("[,-]", match[1]) for match in found if match}
        return {int(slot): int(match[2]) for match in slots for slot in slots[match]}

    @property
    def losses(self) -> list[str]:
        return [line for line in self.lines if re.search(r"run: (rank|a process).* (was|exited|raised)", line)]


def test_a_job_below_its_minimum_saves_and_leaves_when_it_is_asked_to_end(tmp_path: Path) -> None:
    job = Running(tmp_path, [[1, 20, "SIGKILL"]], "--ranks", "3:3", stops=True, late=True, end=10**9)
    job.until("2 ranks are left of at least 3: waiting for 1 to start")
    assert job.end(signal.SIGTERM) < 15  # of the 30 s that they have
    # They may make a step before the signal comes: they meet as soon as it was sent.
    assert job.saved.keys() == {0, 2} and set(job.saved.values()) in ({21}, {22})
    assert job.losses == ["paceline run: rank 1 was killed by SIGKILL (at step 20)"]
    assert descendants_named(tmp_path) == []


def test_a_signal_that_ends_nothing_goes_to_those_alone_that_are_in_a_generation(tmp_path: Path) -> None:
    """The spare has no handler, and would die of it."""
    job = Running(tmp_path, [], "--ranks", "2:2", "--spares", "1", stops=True, end=10**9)
    job.until("[0] generation 0", "[1] generation 0", "[2] member 2 waits")
    job.end(signal.SIGUSR1)
    assert job.saved.keys() == {0, 1} and len(set(job.saved.values())) == 1
    assert job.losses == []
    assert "ended by SIGUSR1" in job.lines[-1]
    assert descendants_named(tmp_path) == []


def test_a_rank_that_is_told_by_others_than_the_launcher_has_all_leave(run: Run) -> None:
    """They were not lost, and are not restarted."""
    done = run([[1, 20, "SIGTERM"]], "--ranks", "1:2", "--max-restarts", "2", stops=True, end=10**9)
    assert done.code == 143
    assert done.said[1:] == [line for line in done.said if line.startswith("ended by SIGTERM; logs: ")]
    assert re.findall(r"saved at step (\d+)", done.out)[0] in ("20", "21")
