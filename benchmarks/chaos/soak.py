"""Minutes of training to which a fault comes every 15 seconds: does it end with the right bits, and does anything grow?

    python benchmarks/chaos/soak.py --minutes 10 --json benchmarks/NAME.json
    python benchmarks/chaos/soak.py --minutes 2 --ways elastic --seed 3

Ranks are killed, two of them at once, stopped for a moment, and stopped for good; those that are lost come back. Any
process of the job may be hit, rank 0, spares and those that have just started too. In the second half the process that
is rank 0 at half-time is left alone, so that there is one which lives through many generations: its memory, descriptors
and threads, and the launcher's, must not grow. A quiet job of one rank then makes the same number of steps without a
pause, and has to end with the same digest. Goodput is the time that the committed steps take when nothing happens, by
the wall clock.

The same faults come to torch's DistributedDataParallel under torchrun, which restarts all ranks from checkpoints.
"""

import argparse
import json
import os
import platform
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from conduct import HERE, MARK, Watched, end_all, files_in_shared_memory, processes_of

from paceline.bench.results import dump_json

WAYS = ("elastic", "torch")
EVERY_S, FIRST_S = 15.0, 5.0  # faults; the first so long after the first step
SAMPLE_S = 2.0
MARGIN_S = 4.0  # before its end a job is told which step is the last
ENDS_S = 90.0  # within which it has to
KINDS = {"kill": 6, "kill two": 2, "stop for a moment": 3, "stop": 1}
MOMENT_S = 1.5
# What may grow: the allocator keeps pieces for later. A leak of 100 KiB in each generation is more than this.
MEMORY_GROWS = 0.05


@dataclass(frozen=True)
class Fault:
    """Comes `at` seconds after the first step, to the process that is the `share`-th part of the way down the list."""

    at: float
    kind: str
    share: float


@dataclass
class Process:
    """What was sampled of one process: its age, and what it has, at each time."""

    name: str
    times: list[float] = field(default_factory=list)
    memory_kib: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def sample(self, pid: int, at: float) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len([*Path(f"/proc/{pid}/fd").iterdir()])
        except OSError:  # it has ended
            return
        own = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
        if "RssAnon" not in own:
            return
        self.times.append(round(at, 1))
        self.memory_kib.append(own["RssAnon"] + own["RssShmem"])
        self.descriptors.append(descriptors)
        self.threads.append(own["Threads"])

    def growth(self, since: float) -> dict[str, Any]:
        """Of each thing: at first, at last, and a minute's growth by the line through all samples."""
        kept = [number for number, at in enumerate(self.times) if at >= since]
        if len(kept) < 8:
            return {}
        found: dict[str, Any] = {"seconds": round(self.times[kept[-1]] - self.times[kept[0]], 1)}
        quarter = max(2, len(kept) // 4)
        for name in ("memory_kib", "descriptors", "threads"):
            values = [getattr(self, name)[number] for number in kept]
            # The least of many: a generation that is just forming has more of everything.
            first, last = min(values[:quarter]), min(values[-quarter:])
            slope = statistics.linear_regression([self.times[number] for number in kept], values).slope
            found[name] = {"first": first, "last": last, "per_minute": round(slope * 60, 2)}
        return found


def grows(growth: dict[str, Any]) -> list[str]:
    """What of a process has grown."""
    found = []
    for name in ("memory_kib", "descriptors", "threads"):
        if name in growth:
            first, last = growth[name]["first"], growth[name]["last"]
            if last > first * (1 + MEMORY_GROWS if name == "memory_kib" else 1):
                found.append(f"{name} from {first} to {last} in {growth['seconds']:g} s")
    return found


def plan(seconds: float, seed: int) -> list[Fault]:
    """The faults of a run, which follow from the seed."""
    drawn, at, faults = random.Random(seed), FIRST_S, []
    while at < seconds - MARGIN_S:
        kind = drawn.choices([*KINDS], [*KINDS.values()])[0]
        faults.append(Fault(round(at, 2), kind, drawn.random()))
        at += drawn.uniform(0.3, 1.7) * EVERY_S
    return faults


class Soak:
    """One job, and what comes to it."""

    def __init__(self, way: str, folder: Path, seconds: float, faults: list[Fault], ranks: int) -> None:
        self.mark = secrets.token_hex(8)
        self.way, self.folder, self.seconds, self.ranks = way, folder, seconds, ranks
        self.faults = list(faults)
        self.until = folder / "until"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.watched = Watched()
        self.seen: dict[int, Process] = {}
        self.hit: list[str] = []
        self.elder: int | None = None
        self.conts: list[tuple[float, int]] = []
        self.first_step_at: float | None = None

    def run(self) -> dict[str, Any]:
        shared = files_in_shared_memory()
        self.began = time.monotonic()
        launcher = subprocess.Popen(
            [*self._command(), "--until", str(self.until)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=self.folder,
            env=environment(self.mark, self.temporary),
        )
        assert launcher.stdout is not None
        self.watched.follow(launcher.stdout)
        self._attend(launcher)
        wall_s = time.monotonic() - self.began
        hung = launcher.poll() is None
        if hung:
            end_all(processes_of(self.mark))
        launcher.wait(10)
        self.watched.join()
        time.sleep(0.5)
        left = [f"process {pid}" for pid in processes_of(self.mark)]
        end_all(processes_of(self.mark))
        left += [f"file {name}" for name in sorted(files_in_shared_memory() - shared)]
        left += [f"file {path.name}" for path in self.temporary.iterdir()]
        (self.folder / "output").write_text(
            "\n".join(f"{at - self.began:8.2f} {line}" for at, line in self.watched.lines)
        )
        return self._told(launcher.returncode, hung, wall_s, left)

    def _command(self) -> list[str]:
        script = [str(HERE / "job.py"), self.way, str(self.folder), "--steps", str(10**9)]
        if self.way == "torch":
            torchrun = str(Path(sys.executable).with_name("torchrun"))
            restarts = ["--nproc-per-node", str(self.ranks), "--max-restarts", "1000"]
            return [torchrun, *restarts, *script, "--timeout", "20"]
        run = [sys.executable, "-u", "-m", "paceline.cli", "run", "--log-dir", str(self.folder / "runs")]
        return [*run, "--ranks", f"1:{self.ranks}", "--spares", "1", *script]

    def _attend(self, launcher: "subprocess.Popen[str]") -> None:
        """Let faults come, and look at processes, until the job has ended, or should have."""
        look_at, told = 0.0, False
        while launcher.poll() is None and self.now < self.seconds + ENDS_S:
            if self.first_step_at is None and self.watched.step >= 0:
                self.first_step_at = self.now
            if self.now >= look_at:
                look_at = self.now + SAMPLE_S
                for pid in (launcher.pid, *self._ranks(launcher.pid)):
                    name = "launcher" if pid == launcher.pid else f"rank process {pid}"
                    self.seen.setdefault(pid, Process(name)).sample(pid, self.now)
            if self.elder is None and self.now >= self.seconds / 2:
                self.elder = self._rank_0(self._ranks(launcher.pid))
            began = self.first_step_at
            while self.faults and began is not None and self.now >= began + self.faults[0].at:
                self._hit(self.faults.pop(0), [pid for pid in self._ranks(launcher.pid) if pid != self.elder])
            for at, pid in list(self.conts):
                if self.now >= at:
                    self.conts.remove((at, pid))
                    send(pid, signal.SIGCONT)
            if self.now >= self.seconds and not told:
                told = True
                if self.way == "torch":
                    break  # what it has made by now is what counts
                new = self.until.with_suffix(".new")
                new.write_text(str(self.watched.step + int(MARGIN_S / 0.03)))
                new.replace(self.until)
            time.sleep(0.02)
        if self.way == "torch":
            end_all(processes_of(self.mark))

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def _ranks(self, launcher: int) -> list[int]:
        """The processes that run the script."""
        found = []
        for pid in sorted(processes_of(self.mark)):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if pid != launcher and str(HERE / "job.py").encode() in words and b"\0RANK=" in b"\0" + variables:
                found.append(pid)
        return found

    def _rank_0(self, ranks: list[int]) -> int | None:
        """The process that has told the newest step."""
        for _, line in reversed(self.watched.lines):
            if found := re.search(r"chaos: step \d+ by (\d+)", line):
                return int(found[1]) if int(found[1]) in ranks else None
        return None

    def _hit(self, fault: Fault, ranks: list[int]) -> None:
        if not ranks:
            return
        first = int(fault.share * len(ranks))
        victims = [ranks[first]] + ([ranks[(first + 1) % len(ranks)]] if fault.kind == "kill two" else [])
        self.hit.append(f"{self.now:.1f} s: {fault.kind}, at step {self.watched.step}")
        for pid in set(victims):
            send(pid, signal.SIGKILL if fault.kind.startswith("kill") else signal.SIGSTOP)
            if fault.kind == "stop for a moment":
                self.conts.append((self.now + MOMENT_S, pid))

    def _told(self, code: int, hung: bool, wall_s: float, left: list[str]) -> dict[str, Any]:
        lines = [line for _, line in self.watched.lines]
        digests = {found[1] for line in lines if (found := re.search(r"chaos: digest (\S+)", line))}
        steps = [int(found[1]) for line in lines if (found := re.search(r"chaos: step (\d+)", line))]
        launchers = [
            one.growth((self.first_step_at or 0.0) + FIRST_S) for one in self.seen.values() if one.name == "launcher"
        ]
        elder = self.seen[self.elder].growth(self.seconds / 2) if self.elder is not None else {}
        return {
            "code": code,
            "hung": hung,
            "seconds": round(wall_s, 1),
            "first_step_s": self.first_step_at,
            "steps": max(steps, default=0),
            "redone": len(steps) - len(set(steps)),
            "digests": sorted(digests),
            "faults": self.hit,
            "generations": sum("paceline run: generation " in line for line in lines),
            "launcher": launchers[0] if launchers else {},
            "oldest rank": elder,
            "left": left,
        }


def environment(mark: str, temporary: Path) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return base | {MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def quiet(way: str, folder: Path, steps: int, ranks: int, pause_s: float) -> tuple[set[str], float]:
    """The digests of a job to which nothing comes, and the seconds of one of its steps."""
    folder.mkdir(parents=True)
    script = [str(HERE / "job.py"), way, str(folder), "--steps", str(steps), "--pause", str(pause_s)]
    if way == "torch":
        command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks), *script]
    else:
        logs = ["--log-dir", str(folder / "runs")]
        command = [sys.executable, "-u", "-m", "paceline.cli", "run", *logs, "--ranks", str(ranks), *script]
    (folder / "tmp").mkdir()
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=environment(secrets.token_hex(8), folder / "tmp"),
    )  # fmt: skip
    assert job.stdout is not None
    watched = Watched()
    watched.follow(job.stdout)
    job.wait()
    watched.join()
    at = [when for when, line in watched.lines if re.search(r"chaos: step \d+", line)]
    found = {match[1] for _, line in watched.lines if (match := re.search(r"chaos: digest (\S+)", line))}
    if job.returncode != 0 or len(found) != 1 or len(at) < 2:
        raise SystemExit("the quiet job failed:\n" + "\n".join(line for _, line in watched.lines[-30:]))
    return found, statistics.median(after - before for before, after in pairwise(at))


def judge(way: str, told: dict[str, Any], digests: set[str]) -> list[str]:
    """What is wrong with a soak of ours."""
    found = [f"left behind: {name}" for name in told["left"]]
    if told["hung"] or told["code"]:
        found.append("it did not come to its end" if told["hung"] else f"exit status {told['code']}")
    if set(told["digests"]) != digests:
        found.append(f"expected the digest {sorted(digests)}, got {told['digests']}")
    for name in ("launcher", "oldest rank"):
        found += [f"{name}: {what}" for what in grows(told[name])]
    return found if way == "elastic" else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder, faults = Path(tempfile.mkdtemp(prefix="soak-")), plan(given.minutes * 60, given.seed)
    results: dict[str, Any] = {"settings": {"minutes": given.minutes, "ranks": given.ranks, "seed": given.seed}}
    results |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
    results["plan"] = [asdict(fault) for fault in faults]
    wrong: list[str] = []
    for way in [way for way in given.ways.split(",") if way]:
        told = Soak(way, folder / way, given.minutes * 60, faults, given.ranks).run()
        _, step_s = quiet(way, folder / f"quiet-{way}", 200, given.ranks, 0.03)
        told |= {"step_s": round(step_s, 4), "goodput": round(told["steps"] * step_s / told["seconds"], 3)}
        digests: set[str] = set()
        if way == "elastic":
            digests, _ = quiet(way, folder / f"right-{way}", told["steps"], 1, 0.0)
        told["wrong"] = judge(way, told, digests)
        results[way] = told
        wrong += told["wrong"]
        sys.stdout.write(f"{way}: {json.dumps({k: v for k, v in told.items() if k != 'faults'}, indent=1)}\n")
    sys.stdout.write(f"output: {folder}\n" + "".join(f"wrong: {what}\n" for what in wrong))
    if given.json is not None:
        given.json.write_text(dump_json(results))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
