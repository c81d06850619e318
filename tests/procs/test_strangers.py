"""Strangers at every port of a job: whoever connects to what a job listens on and sends what does not belong there
changes nothing of what the job computes, and keeps it from nothing.

The stranger finds the sockets as anyone on the machine can, by the kernel's tables.
"""

import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import cast

import pytest
from torch.distributed import PrefixStore, TCPStore

from paceline.collectives.peers import Identity
from paceline.member import Member
from paceline.member_messages import Generation, MemberStore
from paceline.start.elastic_world import _Meeting
from tests.listeners import Listener, listeners_of, tree_of

JOB_S = 50.0
IDLE = 64  # connections to one socket that say nothing
MOST_KIB = 700 << 10  # of memory of a process: twice what it takes where nobody visits
PACELINE = (sys.executable, "-m", "paceline.cli")
VALIDATE = b"\x0a" + struct.pack("<I", 0x3C85F7CE)  # how a client of torch's store begins

MODEL = """
import hashlib, os, sys, time
import torch, paceline

world = paceline.init(device="cpu")
torch.manual_seed(0)
if "RANK" in os.environ:  # a rank listens for its peers until they have all come
    time.sleep(int(os.environ["RANK"]))
model = paceline.DistributedDataParallel(torch.nn.Linear(8, 4), transport=sys.argv[1], lanes=4)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)

def backwards(step):
    for number, microbatch in enumerate(model.lanes([torch.full((2, 8), step + 1.0)] * (4 // world.size), step)):
        (model(microbatch) ** 2).sum().backward()
    time.sleep(0.02)

def say():
    text = str([param.tolist() for param in model.parameters()])
    print("digest", hashlib.sha256(text.encode()).hexdigest(), flush=True)
"""
STATIC = f"""{MODEL}
for step in range(30):
    backwards(step)
    optimizer.step()
    optimizer.zero_grad()
    paceline.barrier()
say()
"""
ELASTIC = f"""{MODEL}
run = paceline.Elastic(model=model, optimizer=optimizer)
while run.step < 30:
    with run.attempt():
        backwards(run.step)
        with run.commit():
            optimizer.step()
        optimizer.zero_grad()
run.finish()
say()
"""
CELL = """
import torch, paceline, time
x = torch.ones(3)
for step in range(40):
    x = paceline.all_reduce(x * 1.5, "mean")
    time.sleep(0.02)
print("digest", x.tolist(), flush=True)
"""
NOTEBOOK = f"""
from jupyter_core.utils import ensure_event_loop
ensure_event_loop()
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions

class Seen:
    def take(self, event, now):
        print(getattr(event, "text", ""), end="")
    def tick(self, now):
        return
    def close(self, now):
        return

kernels = RankKernels(StartOptions(2, gpu_ids=()), lambda seen: None)
outcome = kernels.run({CELL!r}, [0, 1], Seen())
kernels.close()
assert not outcome.failures and not outcome.deaths, outcome
"""


@dataclass
class Stranger:
    """Connects to whatever a job listens on, and keeps connections that it does not end."""

    draw: random.Random
    kept: ExitStack
    met: dict[str, int] = field(default_factory=dict)  # kind of socket → how many it has sent to
    visits: dict[Listener, int] = field(default_factory=dict)

    def visit(self, listener: Listener) -> None:
        """Send it everything, and leave idle connections behind."""
        number = self.visits[listener] = self.visits.get(listener, 0) + 1
        if number > 2:  # a socket that stays has seen it all
            return
        for frame in self._frames():
            self._send(listener, frame)
        for _ in range(IDLE if number == 1 else 0):
            self._send(listener, b"")
        self.met[listener.kind] = self.met.get(listener.kind, 0) + 1

    def _frames(self) -> Iterator[bytes]:
        yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.draw.randbytes(512)
        yield from (self.draw.randbytes(self.draw.randrange(1, 2000)) for _ in range(4))
        yield VALIDATE + b"\x00" + struct.pack("<Q", 1 << 40)  # a key of a terabyte
        yield VALIDATE + b"\x00" + struct.pack("<Q", 4 << 20) + b"half of it"
        yield b'["0123456789abcdef0123456789abcdef", 1, "0123456789abcdef0123456789abcdef"]'
        yield b"[" * 4000
        yield (1 << 40).to_bytes(8, "little")  # to gloo, the number of a connection that nobody waits for

    def _send(self, listener: Listener, frame: bytes) -> None:
        with suppress(OSError):
            connection = self.kept.enter_context(connected(listener))
            if frame:
                connection.send(frame)


def connected(listener: Listener) -> socket.socket:
    if listener.kind == "tcp":
        return socket.create_connection((listener.address, listener.port), timeout=0.5)
    path = "\0" + listener.address[1:] if listener.address.startswith("@") else listener.address
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.settimeout(0.5)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            continue
        return connection
    raise ConnectionRefusedError(path)


@dataclass
class Ended:
    """How a job ended: what it printed as its digest, the peak of its processes' memory, and what it met."""

    output: str
    digests: list[str]
    peak_kib: int
    stranger: Stranger


def run_job(command: Sequence[str], folder: Path, *, strange: bool) -> Ended:
    """Run a job to its end, with a stranger at all its sockets if `strange`."""
    with ExitStack() as kept, (folder / "output").open("w+") as output:
        stranger, peak = Stranger(random.Random(0), kept), 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        until = time.monotonic() + JOB_S
        try:
            while job.poll() is None and time.monotonic() < until:
                tree = tree_of(job.pid)
                found = listeners_of(tree) if strange else []
                for listener in sorted(found, key=lambda one: one.kind != "unix"):  # those stay for a moment only
                    if listener.kind != "udp":
                        stranger.visit(listener)
                peak = max([peak, *map(peak_kib, tree)])
                time.sleep(0.01)
        finally:
            job.kill()
            job.wait()
        text = (folder / "output").read_text()
    assert job.returncode == 0, text
    return Ended(text, re.findall(r"digest (.*)", text), peak, stranger)


def peak_kib(pid: int) -> int:
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc", str(pid), "status").read_text())
        return int(found[1]) if found else 0
    return 0


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training of one rank alone, which nobody visits, comes to: lanes give it in every world."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "job.py").write_text(STATIC)
    (found,) = run_job((sys.executable, "job.py", "auto"), folder, strange=False).digests
    return found


@pytest.mark.parametrize(
    ("script", "command", "sockets"),
    [
        (STATIC, (*PACELINE, "run", "-n", "2", "job.py", "auto"), {"tcp", "unix"}),
        (ELASTIC, (*PACELINE, "run", "--ranks", "2", "job.py", "torch"), {"tcp"}),
    ],
    ids=["run", "elastic"],
)
def test_a_job_that_strangers_visit_computes_the_same(
    script: str, command: Sequence[str], sockets: set[str], tmp_path: Path, digest: str
) -> None:
    (tmp_path / "job.py").write_text(script)
    visited = run_job(command, tmp_path, strange=True)
    assert sockets <= visited.stranger.met.keys(), "the stranger met nobody"
    assert set(visited.digests) == {digest}
    assert visited.peak_kib < MOST_KIB


def test_a_notebook_that_strangers_visit_computes_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NOTEBOOK)
    visited = run_job((sys.executable, "job.py"), tmp_path, strange=True)
    assert {"tcp", "unix"} <= visited.stranger.met.keys(), "the stranger met nobody"
    assert set(visited.digests) == {"[11057332.0, 11057332.0, 11057332.0]"}  # 1.5 to the power of 40, as a float32
    assert visited.peak_kib < MOST_KIB


class LateMember:
    """As much of a member as it takes to meet the others of a generation."""

    def __init__(self, number: int, port: "Queue[int]") -> None:
        self.id, self._port = number, port

    def send(self, message: MemberStore) -> None:
        self._port.put(message.port)

    def await_store(self, generation: int) -> tuple[str, int]:
        port = self._port.get(timeout=20)
        self._port.put(port)
        return "127.0.0.1", port

    def ended(self, generation: int) -> tuple[()]:
        return ()


def test_a_rank_of_an_old_generation_says_nothing_to_a_newer_one() -> None:
    port: Queue[int] = Queue()
    members = [LateMember(number, port) for number in (0, 1)]
    old, new = (Generation(number, (0, 1), (0,), 3, False) for number in (4, 5))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(_Meeting(cast(Member, members[0]), new).meet)
        # The port may be one that the store of the old generation had: to the late rank nothing is amiss.
        host, number = members[1].await_store(old.number)
        late = TCPStore(host, number, timeout=timedelta(seconds=5), wait_for_workers=False)
        PrefixStore("arrived", PrefixStore(f"generation {old.number}", late)).set("1", "a process that is gone")
        with pytest.raises(TimeoutError):
            first.result(timeout=0.3)
        second = threads.submit(_Meeting(cast(Member, members[1]), new).meet)
        for met in (first, second):
            _, (other,) = met.result(timeout=20)
            assert other == Identity.own()
        del late, met
        first = second = None  # type: ignore[assignment]  # or their stores outlive the test
