"""`paceline run --engine ray` on a real cluster: nodes are killed, frozen and added, and the result stays the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.listeners import listeners_of
from tests.processes import alive, tree

pytestmark = pytest.mark.timeout(180)  # Ray takes seconds to start, and many on a busy machine
PATIENCE_S = 60.0
ROOT = Path(__file__).parent.parent.parent
TRAINING = Path(__file__).parent.parent / "ray_training.py"


class NotStarted(Exception):
    """Ray gives its own processes half a minute, which a busy machine may need."""


class Cluster:
    """A head without CPUs and nodes of one CPU each; a node is named by the process id of its raylet."""

    def __init__(self, nodes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "ray_cluster.py"), str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        try:
            self.address = self._read()
            self.nodes = [int(self._read()) for _ in range(nodes)]
        except BaseException:
            self._process.communicate()
            raise

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise NotStarted
        return str(json.loads(line))

    def add(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self.nodes.append(int(self._read()))

    def node_of(self, pid: int) -> int:
        """The node that a rank runs on."""
        return next(node for node in self.nodes if pid in tree(node))

    def close(self) -> None:
        pids = [pid for node in self.nodes for pid in tree(node)]
        self._process.communicate()
        await_death(pids)


class Launcher:
    """A running `paceline run`."""

    def __init__(self, process: "subprocess.Popen[Any]", output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def text(self) -> str:
        return self._output.read_text()

    def await_text(self, pattern: str, after: int = 0) -> "re.Match[str]":
        until = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.text[after:])) is None:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, f"{pattern!r} never came:\n{self.text}"
            time.sleep(0.02)
        return found

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)


def environment(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT / "src")}


def processes_of_job(raylet: int) -> list[int]:
    """What a node runs for a job: its agents, which Ray names after their class, and all that these have started."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in tree(raylet)}
    agents = [pid for pid, title in titles.items() if title.startswith("ray::") and "IDLE" not in title]
    found = {pid for agent in agents for pid in tree(agent)}
    assert found.issuperset(ranks_on(raylet)), titles
    return sorted(found)


def ranks_on(raylet: int) -> list[int]:
    """The processes of the script on a node: what else it runs is Ray's."""
    return [pid for pid in tree(raylet) if "ray_training" in Path(f"/proc/{pid}/cmdline").read_text()]


def await_death(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, f"still alive: {left}"
        time.sleep(0.02)


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        made = Cluster(2)
    except NotStarted:
        made = Cluster(2)
    yield made
    made.close()


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> Launcher:
        output = tmp_path / "output"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "run", "--engine", "ray", "--log-dir", str(tmp_path), *words],
                stdout=stream,
                stderr=stream,
                text=True,
                cwd=tmp_path,
                env=environment(cluster),
            )
        started.append(process)
        return Launcher(process, output)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_job_looks_as_on_one_machine(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, paceline, torch\n"
        "world = paceline.init()\n"
        "total = torch.tensor(float(world.rank + 1)); torch.distributed.all_reduce(total)\n"
        "print('sum', total.item(), os.environ['GROUP_WORLD_SIZE'], sys.argv[1:], os.getcwd())\n"
        "print('pid', os.getpid())\n"
        "paceline.shutdown()\n"
        "if world.rank == 1: raise ValueError('as asked')\n"
    )
    job = launch("-n", "2", str(script), "--lr", "1")
    assert job.end() == 1
    assert f"[0-1] sum 3.0 2 ['--lr', '1'] {tmp_path}\n" in job.text
    assert "paceline run: rank 1 raised ValueError: as asked\n" in job.text
    assert "raise ValueError('as asked')" in next(tmp_path.glob("*/rank_1.log")).read_text()
    await_death([int(pid) for pid in re.findall(r"pid (\d+)", job.text)])


def test_a_job_waits_for_room_and_says_so(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    job = launch("-n", "3", "--no-python", "true")
    job.await_text(
        r"ranks 0-2 wait for room in the Ray cluster: each of them needs 1 CPU; its 3 machines have 2 CPUs free"
    )
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130


def test_nothing_is_left_when_the_driver_is_killed(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, time\n"
        "print('pid', os.getpid()); print('pid', subprocess.Popen(['sleep', '99'], start_new_session=True).pid)\n"
        "time.sleep(99)\n"
    )
    job = launch("-n", "2", str(script))
    job.await_text(r"(?s)(pid \d+.*){4}")
    job.process.kill()
    await_death([int(pid) for pid in re.findall(r"pid (\d+)", job.text)])


def test_nodes_die_freeze_and_come(launch: Callable[..., Launcher], cluster: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = launch("--ranks", "1:2", str(TRAINING), str(stop))
    job.await_text(r"generation 0: 2 ranks")
    job.await_text(r"step \d+ of 2")
    killed = tree(cluster.nodes.pop(0))
    at = len(job.text)
    send(signal.SIGKILL, killed)
    job.await_text(r"rank \d( \(slot \d\))? was lost with its machine", at)
    job.await_text(r"step \d+ of 1", at)
    at = len(job.text)
    cluster.add()
    job.await_text(r"step \d+ of 2", at)
    ours = listeners_of(pid for node in cluster.nodes for pid in ranks_on(node))
    assert "tcp" in {listener.kind for listener in ours}
    assert all(listener.is_local for listener in ours), ours  # the nodes have addresses of loopback
    raylet = cluster.nodes[0]
    frozen, of_job = tree(raylet), processes_of_job(raylet)
    at = len(job.text)
    send(signal.SIGSTOP, frozen)
    try:
        job.await_text(r"rank \d( \(slot \d\))? was lost with its machine .*: no answer for", at)
        job.await_text(r"step \d+ of 1", at)
        at = len(job.text)
        cluster.add()
        step = int(job.await_text(r"step (\d+) of 2", at)[1])
        stop.write_text(str(step + 10))
        assert job.end() == 0
    finally:
        send(signal.SIGCONT, frozen)
    found = re.search(r"end (\d+) (\w+)", job.text)
    assert found is not None, job.text
    steps, digest = int(found[1]), found[2]
    quiet = subprocess.run(
        [sys.executable, str(TRAINING), "none", str(steps)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert f"end {steps} {digest}\n" in quiet.stdout
    # Also those of the job that were frozen, when they can run again. Their node lives on if Ray has not missed it yet.
    await_death([*killed, *of_job])
