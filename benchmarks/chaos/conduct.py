"""Runs one job with one row of the matrix, watches it from outside, and says what it saw."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from cases import LIMIT_S, Case
from hosts import Hosts, two_hosts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 120
MARK = "PACELINE_CHAOS"  # a variable that every process of a job has, by which those that are left are found


@dataclass
class Seen:
    """What was seen of one job. Times are in seconds from the fault; `redone` are steps that were done again."""

    outcome: str = "finished"  # or failed, hung
    code: int = 0
    named_s: float | None = None
    back_s: float | None = None
    redone: int = 0
    digests: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    said: str = ""  # the line that named it
    end: list[str] = field(default_factory=list)  # the last lines, of a job that went wrong

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Watched:
    """The lines of a job's processes, with when they came."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self.step = -1
        self._threads: list[threading.Thread] = []

    def follow(self, stream: IO[str]) -> None:
        thread = threading.Thread(target=self._read, args=[stream])
        self._threads.append(thread)
        thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.lines.append((time.monotonic(), line.rstrip()))
                if found := re.search(r"chaos: step (\d+)", line):
                    self.step = int(found[1])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(5)


def commands(case: Case, way: str, folder: Path, hosts: Hosts | None) -> list[tuple[list[str], dict[str, str]]]:
    """What is started for a case, and with which variables."""
    script = [str(HERE / "job.py"), way, str(folder), "--steps", str(STEPS), "--workers", str(case.workers)]
    script += ["--clock", str(case.clock)] if case.clock else []
    faults = {"PACELINE_FAULTS": "; ".join(case.faults)} if case.faults else {}
    if hosts is not None:
        return [
            (hosts.command(rank, [sys.executable, "-u", *script]), hosts.environment(rank) | faults) for rank in (0, 1)
        ]
    if way == "torch":
        return [([_beside("torchrun"), "--nproc-per-node", str(case.ranks), "--max-restarts", "4", *script], faults)]
    run = [sys.executable, "-u", "-m", "paceline.cli", "run", "--log-dir", str(folder / "runs"), "--max-restarts", "4"]
    ranks = ["--ranks", f"1:{case.ranks}"] if way == "elastic" else ["-n", str(case.ranks)]
    return [([*run, *ranks, *script], faults)]


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def run(case: Case, way: str, folder: Path, limit_s: float = LIMIT_S) -> Seen:
    """One job, or two where the second goes on after the first."""
    folder.mkdir(parents=True)
    seen = _run_once(case, way, folder, limit_s)
    if case.again and seen.outcome != "hung":
        second = _run_once(Case(id=case.id, about=case.about, ranks=case.ranks), way, folder, limit_s)
        second.redone, second.left = max(second.redone, seen.redone), [*seen.left, *second.left]
        second.code, second.seconds = second.code or 0, second.seconds + seen.seconds
        second.said = f"first exit status {seen.code}"
        return second
    return seen


def _run_once(case: Case, way: str, folder: Path, limit_s: float) -> Seen:
    mark, began = secrets.token_hex(8), time.monotonic()
    before = files_in_shared_memory()
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    watched, at = Watched(), None
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if case.hosts else None
        started = []
        for words, more in commands(case, way, folder, hosts):
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                cwd=folder,
                env=base
                | more
                | {MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
                | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
            )
            assert process.stdout is not None
            watched.follow(process.stdout)
            started.append(process)
        deeds = list(case.signals) + ([(60, case.hosts)] if case.hosts else [])
        while any(process.poll() is None for process in started) and time.monotonic() - began < limit_s:
            while deeds and watched.step >= deeds[0][0]:
                _, deed = deeds.pop(0)
                at = at or time.monotonic()
                if hosts is None:
                    started[0].send_signal(getattr(signal, f"SIG{deed}"))
                    time.sleep(0.3)
                else:
                    threading.Thread(target=hosts.happens(deed), daemon=True).start()
            time.sleep(0.02)
        if hosts is not None:
            hosts.over.set()
        hung = [process for process in started if process.poll() is None]
        end_all([*processes_of(mark)] if hung else [])
        for process in started:
            process.wait(10)
        watched.join()
    seen = _read_off(case, watched.lines, at)
    seen.seconds, seen.code = time.monotonic() - began, next((p.returncode for p in started if p.returncode), 0)
    seen.outcome = "hung" if hung else "finished" if seen.digests else "failed"
    time.sleep(0.3)
    seen.left = [f"process {pid}" for pid in processes_of(mark)]
    seen.left += [f"file {path}" for path in (files_in_shared_memory() - before)] + [
        f"file {one.name}" for one in temporary.iterdir()
    ]
    end_all([int(name.split()[1]) for name in seen.left if name.startswith("process")])
    if seen.outcome != "finished":
        seen.end = [line for _, line in watched.lines if "frame #" not in line][-25:]
    return seen


def _read_off(case: Case, lines: list[tuple[float, str]], at: float | None) -> Seen:
    """What the lines say: when it happened, when it was named, when training went on."""
    seen, last, steps = Seen(), -1, 0
    for when, line in lines:
        if at is None and "injected fault" in line:
            at = when
        step = re.search(r"chaos: step (\d+)", line)
        if step is not None:
            number = int(step[1])
            if number <= last:
                steps += 1
            if at is not None and when > at and seen.back_s is None and number > last:
                seen.back_s = when - at
            last = max(last, number)
        line = re.sub(r"local_rank: (\d+)", r"rank \1 exited", line)  # as torchrun says it
        told = case.named and "injected fault" not in line and re.search(case.named, line)
        if at is not None and when >= at and seen.named_s is None and told:
            seen.named_s, seen.said = when - at, line[:300]
        if found := re.search(r"chaos: digest (\S+)", line):
            seen.digests.append(found[1])
    seen.redone = steps
    return seen


def processes_of(mark: str) -> list[int]:
    """The processes that have the variable, however they were started."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is of another user
            continue
    return found


def end_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def files_in_shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
