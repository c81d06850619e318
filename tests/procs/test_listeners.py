"""What jobs of every kind listen on, as the kernel's socket tables say it while they run: nothing beyond loopback, and
nothing that docs/security.md does not list.

Where root runs the tests, this machine's name leads to its address in the network, as it does on most machines: what
listens wherever the name leads is then seen.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.listeners import Listener, listeners_of, tree_of

JOB_S = 55
NEW_UTS = 0x04000000
PACELINE = (sys.executable, "-m", "paceline.cli")

STORE_OR_GLOO = ("tcp", r"127\.0\.0\.1")
SHARED_MEMORY = ("unix", r"@paceline-[0-9a-f]{32}")
NOTEBOOK = ("unix", r"/.*/paceline-notebook-\w+/rank\d+\.\d+-\d")
KERNELS_OWN = ("tcp", r"127\.0\.0\.1")  # ipykernel's debugger waits for a frontend
CONDUCTOR = ("unix", r"/.*/paceline-bench-\w+/conductor")

REPLICAS = """
import torch, paceline
paceline.init()
for transport in ("torch", "shm"):
    model = paceline.DistributedDataParallel(torch.nn.Linear(8, 4), transport=transport, lanes=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for microbatch in model.lanes([torch.ones(2, 8)] * 2, step):
            model(microbatch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ELASTIC = """
import torch, paceline
paceline.init(device="cpu")
model = paceline.DistributedDataParallel(torch.nn.Linear(8, 4), transport="torch")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = paceline.Elastic(model=model, optimizer=optimizer)
while run.step < 4:
    with run.attempt():
        model(torch.ones(2, 8)).sum().backward()
        with run.commit():
            optimizer.step()
        optimizer.zero_grad()
run.finish()
"""
NOTEBOOK_CELLS = """
from jupyter_core.utils import ensure_event_loop
ensure_event_loop()
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
RankKernels(StartOptions(2, gpu_ids=()), lambda seen: None).close()
"""
TRAIN = "--size nano --steps 2 --warmup 1 --batch 1 --device cpu --ranks 2 --threads 1 --sample 0 --data text --out out"
BENCH = "--model gpt-tiny --steps 1 --burst 1 --warmup 0 --contenders paceline"


def address_in_network() -> str:
    """This machine's own address outside of loopback, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def named_by_its_address(address: str) -> Callable[[], None] | None:
    """What gives a process, and it alone, that name of its machine; only root can."""
    if not address or os.geteuid() != 0:
        return None

    def name() -> None:
        if ctypes.CDLL(None).unshare(NEW_UTS) == 0:
            socket.sethostname(address)

    return name


def seen_while(command: Sequence[str], folder: Path) -> set[Listener]:
    """All that a job listens on at any moment of its life."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    found: set[Listener] = set()
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=output,
            env=environment | {"OMP_NUM_THREADS": "1"},
            preexec_fn=named_by_its_address(address_in_network()),
        )
    until = time.monotonic() + JOB_S
    try:
        while job.poll() is None and time.monotonic() < until:
            found |= listeners_of(tree_of(job.pid))
            time.sleep(0.01)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, (folder / "output").read_text()
    return found


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((*PACELINE, "run", "-n", "2", "replicas.py"), (STORE_OR_GLOO, SHARED_MEMORY)),
        ((*PACELINE, "run", "--ranks", "1:2", "elastic.py"), (STORE_OR_GLOO,)),
        ((*PACELINE, "train", *TRAIN.split()), (STORE_OR_GLOO, SHARED_MEMORY)),
        ((sys.executable, "notebook.py"), (STORE_OR_GLOO, KERNELS_OWN, NOTEBOOK)),
        ((*PACELINE, "bench", "step", *BENCH.split()), (STORE_OR_GLOO, SHARED_MEMORY, CONDUCTOR)),
    ],
    ids=["run", "elastic", "train", "notebook", "bench"],
)
def test_a_job_listens_on_loopback_and_on_what_is_listed(
    command: Sequence[str], expected: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    for name, text in (("replicas.py", REPLICAS), ("elastic.py", ELASTIC), ("notebook.py", NOTEBOOK_CELLS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "text").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    found = seen_while(command, tmp_path)
    assert "tcp" in {listener.kind for listener in found}  # else nothing was seen: what is shown once may be over soon
    for listener in found:
        listed = any(listener.kind == kind and re.fullmatch(where, listener.address) for kind, where in expected)
        assert listed, listener


RANK_ALONE = """
import os, torch, paceline
paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(8, 4), transport="torch")
model(torch.ones(2, 8)).sum().backward()
assert "GLOO_SOCKET_IFNAME" not in os.environ
"""
BOTH_RANKS = """
import os, subprocess, sys
of = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[1]}
start = lambda rank: subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, **of, "RANK": str(rank)})
sys.exit(max([rank.wait() for rank in [start(0), start(1)]]))
"""


def test_without_our_launcher_ranks_of_one_machine_listen_on_loopback(tmp_path: Path, reserved_port: int) -> None:
    (tmp_path / "rank.py").write_text(RANK_ALONE)
    (tmp_path / "ranks.py").write_text(BOTH_RANKS)
    found = seen_while((sys.executable, "ranks.py", str(reserved_port)), tmp_path)
    assert {listener.address for listener in found if listener.kind == "tcp"} == {"127.0.0.1"}


def test_what_listens_on_all_interfaces_is_seen() -> None:
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        mine = {(one.address, one.port): one for one in listeners_of([os.getpid()]) if one.kind == "tcp"}
        assert not mine[("0.0.0.0", everywhere.getsockname()[1])].is_local
        assert mine[("127.0.0.1", here.getsockname()[1])].is_local
