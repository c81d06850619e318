"""Jobs whose ranks others have started on two machines: torchrun, srun and mpirun, and what their network may do."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hosts import INTERFACE, Host, NotPossible, joined_hosts
from tests.processes import tree

pytestmark = pytest.mark.timeout(180)
PATIENCE_S = 120.0
PORT = "29500"
STEPS = 60
LIMIT_S = 6.0  # for any wait, where a machine is lost for good
NAMED = r"rank 0 has waited [34]\.\d s in .* for rank 1, "

TRAINING = f"""
import os, sys, time, torch, paceline
world = paceline.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
model = paceline.DistributedDataParallel(net, timeout=float(os.environ.get("LIMIT_S", "{PATIENCE_S}")))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS}):
    generator = torch.Generator().manual_seed(2 * step + world.rank)
    model(torch.randn(4, 64, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.rank == 0:
        print("step", step, flush=True)
        time.sleep(0.02)
print("end", world.source, world.node_rank, world.local_size, paceline.digest(model, optimizer, step), flush=True)
paceline.shutdown()
"""


class Ranks:
    """One job on the two machines, of one rank each."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "training.py"
        self.script.write_text(TRAINING)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def start(self, host: Host, words: list[str], variables: Mapping[str, str]) -> None:
        with (self._folder / f"output-{len(self.processes)}").open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    host.command(words),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", **variables},
                )
            )

    def text(self, number: int) -> str:
        return (self._folder / f"output-{number}").read_text()

    def await_text(self, number: int, pattern: str) -> "re.Match[str]":
        until = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.text(number))) is None:
            assert time.monotonic() < until, f"{pattern!r} did not come:\n{self.text(0)}\n{self.text(1)}"
            time.sleep(0.02)
        return found

    def end(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.processes]

    def digests(self, source: str) -> set[str]:
        """What the ranks have come to, once all have ended."""
        return {self.await_text(number, rf"end {source} {number} 1 (\w+)")[1] for number in (0, 1)}


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with joined_hosts(2) as made:
            yield made
    except NotPossible as error:
        pytest.skip(str(error))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for process in made.processes:
        kill(process)
        process.wait()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it has started."""
    for pid in tree(process.pid) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_srun_over_a_cable_that_is_pulled_for_a_while(hosts: list[Host], ranks: Ranks) -> None:
    for number, host in enumerate(hosts):
        task = {"PROCID": str(number), "NTASKS": "2", "NNODES": "2", "NODEID": str(number), "LOCALID": "0"}
        job = {"STEP_NODELIST": ",".join(one.address for one in hosts), "JOB_ID": "14500", "JOB_NAME": "train"}
        variables = {f"SLURM_{name}": value for name, value in {**task, **job}.items()}
        ranks.start(host, [sys.executable, str(ranks.script)], variables)
    ranks.await_text(0, "step 20")
    hosts[1].cut()
    ranks.await_text(0, NAMED)
    hosts[1].mend()
    assert ranks.end() == [0, 0], ranks.text(0)
    assert len(ranks.digests("Slurm")) == 1


def test_mpirun_over_a_slow_link(hosts: list[Host], ranks: Ranks) -> None:
    hosts[1].slow_down("20mbit")
    for number, host in enumerate(hosts):
        numbers = {"RANK": str(number), "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in numbers.items()}
        ranks.start(host, [sys.executable, str(ranks.script)], {**variables, "MASTER_ADDR": hosts[0].address})
    assert ranks.end() == [0, 0], ranks.text(0)
    assert "has waited" not in ranks.text(0) + ranks.text(1), "slow is not lost"
    assert len(ranks.digests("Open MPI")) == 1


def test_torchrun_loses_a_machine(hosts: list[Host], ranks: Ranks) -> None:
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    where += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
    for number, host in enumerate(hosts):
        own = ["--local-addr", host.address, "--rdzv-conf", f"is_host={number == 0}".lower()]
        ranks.start(
            host,
            [sys.executable, "-m", "torch.distributed.run", *where, *own, str(ranks.script)],
            {"LIMIT_S": str(LIMIT_S)},
        )
    ranks.await_text(0, "step 20")
    hosts[1].cut()  # nothing that its processes do in their end is heard
    kill(ranks.processes[1])
    ranks.await_text(0, NAMED)
    assert ranks.end()[0] == 1
    assert re.search(r"PeerAbsent: .* for rank 1\b.*exceeds timeout", ranks.text(0)), ranks.text(0)
