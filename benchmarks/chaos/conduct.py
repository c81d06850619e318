"""Runs one job with one row of the matrix, watches it from outside, and says what it saw."""

import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from cases import ENDED, LIMIT_S, Case, Start
from deeds import DEEDS, damage, memory_group
from hosts import Hosts, two_hosts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEP = re.compile(r"chaos: step (\d+)")
MARK = "PACELINE_CHAOS"  # a variable that every process of a job has, by which those that are left are found


@dataclass
class Seen:
    """What was seen of one job. Times are in seconds from the fault; `redone` are steps that were done again."""

    outcome: str = "finished"  # or failed, hung
    code: int = 0
    first_code: int = 0  # of the first start
    named_s: float | None = None
    back_s: float | None = None
    whole_s: float | None = None  # an elastic job has all of its ranks again
    ended_s: float | None = None  # the rank at fault was ended
    out_s: float | None = None  # the job has ended
    redone: int = 0
    digests: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    load: float = 0.0  # of the machine, when the job began
    said: str = ""  # the line that named it
    end: list[str] = field(default_factory=list)  # the last lines, of a job that went wrong

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Quiet:
    """A job to which nothing happens: what it ends with, how long it starts, and how long one of its steps takes."""

    digest: str
    start_s: float
    step_s: float


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
                if found := STEP.search(line):
                    self.step = int(found[1])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(5)


def commands(
    case: Case, way: str, folder: Path, start: Start, hosts: Hosts | None, *, quiet: bool
) -> list[tuple[list[str], dict[str, str]]]:
    """What is started for a case, and with which variables."""
    ranks, steps = start.ranks or case.ranks, start.steps or case.steps_of(way)
    script = [str(HERE / "job.py"), way, str(folder), "--steps", str(steps), *case.script]
    chosen = () if quiet else case.live if way == "elastic" and case.live else case.faults
    faults = {"PACELINE_FAULTS": "; ".join(chosen)} if chosen else {}
    if hosts is not None:
        return [
            (hosts.command(rank, [sys.executable, "-u", *script]), hosts.environment(rank) | faults) for rank in (0, 1)
        ]
    if case.absent and not quiet:
        return [([sys.executable, "-u", *script], _first_of_two())]
    if way == "torch":
        restarts = ["--nproc-per-node", str(ranks), "--max-restarts", "4", "--log-dir", str(folder / "runs")]
        return [([_beside("torchrun"), *restarts, *script], faults)]
    run = [sys.executable, "-u", "-m", "paceline.cli", "run", "--log-dir", str(folder / "runs"), "--max-restarts", "4"]
    world = ["--ranks", f"1:{ranks}"] if way == "elastic" else ["-n", str(ranks)]
    return [([*run, *world, *case.launch, *script], faults)]


def _first_of_two() -> dict[str, str]:
    """The variables of rank 0 in a world whose other rank does not come."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def run(case: Case, way: str, folder: Path, limit_s: float = LIMIT_S) -> Seen:
    """One job, or several where the next goes on after the one before."""
    folder.mkdir(parents=True)
    whole, last = Seen(), -1
    for number, start in enumerate((Start(),) if way == "elastic" and case.live else case.starts):
        if start.damage:
            damage(folder, start.damage)
        seen, last = _run_once(case, way, folder, start, limit_s, last, quiet=number > 0)
        seen.redone, seen.left, seen.seconds = (
            whole.redone + seen.redone,
            whole.left + seen.left,
            whole.seconds + seen.seconds,
        )
        if number:
            seen.first_code, seen.out_s, seen.load = whole.first_code, whole.out_s, whole.load
            seen.named_s, seen.said = (whole.named_s, whole.said) if whole.said else (seen.named_s, seen.said)
        whole = seen
        if seen.outcome == "hung":
            break
    return whole


def run_quiet(case: Case, way: str, folder: Path) -> Quiet:
    """The same job, without what happens to it."""
    folder.mkdir(parents=True)
    script = tuple(word for word in _calm(case.script))
    calm = Case(id="quiet", about="", ranks=case.like or case.ranks, long=case.long, script=script)
    job = Job(calm, way, folder, Start(), quiet=True)
    seen = job.attend(LIMIT_S)
    steps = [when for when, line in job.watched.lines if STEP.search(line)]
    if seen.outcome != "finished" or len(set(seen.digests)) != 1 or len(steps) < 3:
        raise SystemExit(f"the quiet job of {way} did not finish:\n" + "\n".join(seen.end))
    step_s = statistics.median(after - before for before, after in pairwise(steps))
    return Quiet(seen.digests[0], steps[0] - job.began, step_s)


def _calm(words: tuple[str, ...]) -> Iterator[str]:
    """The arguments of a script without those that are faults."""
    left = iter(words)
    for word in left:
        if word in ("--flip-on-wire", "--swap", "--clock"):
            next(left)
        else:
            yield word


def _run_once(
    case: Case, way: str, folder: Path, start: Start, limit_s: float, last: int, *, quiet: bool
) -> tuple[Seen, int]:
    """What was seen of one start, and its last step."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if case.hosts else None
        before = stack.enter_context(memory_group(case.memory_mib)) if case.memory_mib else []
        job = Job(case, way, folder, start, hosts, before, quiet=quiet)
        seen = job.attend(limit_s, last)
    return seen, job.last


class Job:
    """One start of a job: its processes, what is done to them, and what is seen of them."""

    def __init__(
        self,
        case: Case,
        way: str,
        folder: Path,
        start: Start,
        hosts: Hosts | None = None,
        before: Sequence[str] = (),
        *,
        quiet: bool,
    ) -> None:
        self.case, self.hosts, self.last = case, hosts, -1
        self.mark, self.load, self.began = secrets.token_hex(8), os.getloadavg()[0], time.monotonic()
        self._temporary, self._shared = folder / "tmp", folder / "shm"
        for empty in (self._temporary, self._shared):
            empty.mkdir(exist_ok=True)
        before = [*in_own_shared_memory(self._shared), *before]
        self.watched, self.at = Watched(), self.began if start.damage else None
        self._deeds = [] if quiet else list(case.deeds)
        base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        own = {MARK: self.mark, "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        self._started = []
        for words, more in commands(case, way, folder, start, hosts, quiet=quiet):
            process = subprocess.Popen(
                [*before, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                cwd=folder,
                env=base | more | own,
            )
            assert process.stdout is not None
            self.watched.follow(process.stdout)
            self._started.append(process)

    def attend(self, limit_s: float, last: int = -1) -> Seen:
        """Do what is to be done, and wait until the job has ended or should have. `last`: the last step before."""
        threads = []
        while self._running() and time.monotonic() - self.began < limit_s:
            while self._deeds and self.watched.step >= self._deeds[0][0]:
                threads.append(self._do(self._deeds.pop(0)[1]))
            time.sleep(0.02)
        ended = time.monotonic()
        if self.hosts is not None:
            self.hosts.over.set()
        hung = self._running()
        end_all(processes_of(self.mark) if hung else [])
        for process in self._started:
            process.wait(10)
        for thread in threads:
            thread.join(30)
        self.watched.join()
        seen = self._read_off(last)
        seen.seconds, seen.load = ended - self.began, self.load
        seen.out_s = None if self.at is None or hung else ended - self.at
        seen.code = seen.first_code = next((p.returncode for p in self._started if p.returncode), 0)
        seen.outcome = "hung" if hung else "finished" if seen.digests else "failed"
        seen.left = self._left()
        if seen.outcome != "finished":
            seen.end = [without_folders(line) for _, line in self.watched.lines if "frame #" not in line][-25:]
        return seen

    def _running(self) -> bool:
        return any(process.poll() is None for process in self._started)

    def _do(self, deed: str) -> threading.Thread:
        self.at = self.at or time.monotonic()
        if self.hosts is not None:
            thread = threading.Thread(target=self.hosts.happens(deed), daemon=True)
        else:
            thread = threading.Thread(target=DEEDS[deed], args=[ranks_of(self.mark), self._started[0].pid], daemon=True)
        thread.start()
        time.sleep(0.3)
        return thread

    def _left(self) -> list[str]:
        time.sleep(0.3)
        pids = processes_of(self.mark)
        end_all(pids)
        left = [f"process {pid}" for pid in pids]
        return left + [f"file {one.name}" for folder in (self._shared, self._temporary) for one in folder.iterdir()]

    def _read_off(self, last: int) -> Seen:
        """What the lines say: when it happened, when it was named, when training went on."""
        seen, at = Seen(), self.at
        for when, line in self.watched.lines:
            if at is None and ("injected fault" in line or (self.case.absent and "chaos: loaded" in line)):
                at = when
            after = None if at is None or when < at else when - at
            if (step := STEP.search(line)) is not None:
                number = int(step[1])
                seen.redone += number <= last
                if after is not None and seen.back_s is None and number > last:
                    seen.back_s = after
                last = max(last, number)
            if found := re.search(r"chaos: digest (\S+)", line):
                seen.digests.append(found[1])
            if after is not None and "injected fault" not in line:
                self._notice(seen, line, after)
        self.at, self.last = at, last
        return seen

    def _notice(self, seen: Seen, line: str, after: float) -> None:
        line = re.sub(r"local_rank: (\d+)", r"rank \1 exited", line)  # as torchrun says it
        if seen.named_s is None and self.case.named and re.search(self.case.named, line):
            seen.named_s, seen.said = after, without_folders(line)[:300]
        if seen.ended_s is None and re.search(ENDED, line):
            seen.ended_s = after
        if seen.whole_s is None and re.search(rf"generation \d+: {self.case.ranks} ranks", line):
            seen.whole_s = after


def without_folders(line: str) -> str:
    """Files by their names alone: where they lie here is nobody's business."""
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-])", "", line)


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


def ranks_of(mark: str) -> dict[int, int]:
    """The process of each rank that runs the script, and not of what it has forked."""
    found: dict[int, int] = {}
    for pid in sorted(processes_of(mark)):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            rank = re.search(rb"(?:\A|\0)RANK=(\d+)", variables)
            if rank is not None and str(HERE / "job.py").encode() in words:
                found.setdefault(int(rank[1]), pid)
    return found


def end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def in_own_shared_memory(folder: Path) -> list[str]:
    """The words before a command for which `folder` is all of the shared memory, so that what is left there is its own.

    Only root can do that; for others the folder stays empty.
    """
    if os.getuid() != 0:
        return []
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)]


def files_in_shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
