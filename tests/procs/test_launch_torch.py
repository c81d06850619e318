"""The same script under `paceline run`, with torch's own rendezvous and with ours, on one machine and on two."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import INTERFACE, Host, NotPossible, joined_hosts
from tests.procs.test_launch import says

PORT = 29400
PATIENCE_S = 50.0

# What it listens on is looked at from inside, because the tables of the kernel are those of the own namespace.
LISTENERS = """
def listeners():
    own = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    return found
"""
OURS = f"""
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, paceline
{LISTENERS}
world = paceline.init()
total = torch.ones(1000)
paceline.all_reduce(total)
report = {{"sum": total[0].item(), "rank": world.rank, "size": world.size, "local": world.local_rank,
          "listeners": listeners(), "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}}
Path(sys.argv[1], f"{{world.rank}}-{{report['attempt']}}.json").write_text(json.dumps(report))
if len(sys.argv) > 2 and world.rank == int(sys.argv[2]) and report["attempt"] == "0":
    raise RuntimeError("as asked")
if len(sys.argv) > 2 and report["attempt"] == "0":
    paceline.all_reduce(total)
dist.barrier()
paceline.shutdown()
print("done")
"""
THEIRS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), os.environ["RANK"])
dist.destroy_process_group()
"""


def reports(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{attempt}.json"))]


def start(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "paceline.cli", "run", "--log-dir", str(folder / "runs"), *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def finish(*processes: "subprocess.Popen[str]") -> list[tuple[int, str, str]]:
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE_S)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


def test_one_machine_stays_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    ((code, out, err),) = finish(start(tmp_path, "-n", "2", str(tmp_path / "ours.py"), str(tmp_path)))
    assert code == 0, err
    assert says(out, "done")
    found = reports(tmp_path)
    assert [one["sum"] for one in found] == [2.0, 2.0]
    for one in found:
        assert one["listeners"], "gloo and the store listen somewhere"
        assert set(one["listeners"]) == {"0100007F"}, "on loopback only"


def test_torchs_own_rendezvous_works_beside_the_held_port(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    ((code, out, err),) = finish(start(tmp_path, "-n", "2", "--standalone", str(tmp_path / "theirs.py")))
    assert code == 0, err
    assert "[0] sum 2.0 0\n" in out
    assert "[1] sum 2.0 1\n" in out


def test_the_torchrun_command_that_is_named_for_two_machines_works(tmp_path: Path, reserved_port: int) -> None:
    """Both launchers are on this machine, and meet on its loopback."""
    (tmp_path / "ours.py").write_text(OURS)
    script = (str(tmp_path / "ours.py"), str(tmp_path))
    where = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{reserved_port}")
    ((code, _, err),) = finish(start(tmp_path, *where, *script))
    assert code == 2
    found = re.search(r"(torchrun .*) \(or", err)
    assert found is not None, err
    words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(found[1])[1:]]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    done = finish(*both)
    assert [code for code, _, _ in done] == [0, 0], done
    assert [(one["sum"], one["rank"], one["size"], one["local"]) for one in reports(tmp_path)] == [
        (2.0, 0, 2, 0),
        (2.0, 1, 2, 0),
    ]


@pytest.fixture
def machine() -> Iterator[Host]:
    try:
        with joined_hosts(1) as (made,):
            yield made
    except NotPossible as error:
        pytest.skip(str(error))


def test_a_store_listens_at_the_address_that_was_named(machine: Host, tmp_path: Path) -> None:
    """Whoever starts the ranks: the store of rank 0 is not on all interfaces, where torch would put it."""
    (tmp_path / "ours.py").write_text(OURS)
    own = socket.inet_aton(machine.address)[::-1].hex().upper()
    seats = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": machine.address, "MASTER_PORT": str(PORT)}
    ranks = [
        subprocess.Popen(
            machine.command([sys.executable, str(tmp_path / "ours.py"), str(tmp_path)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **seats,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        )
        for rank in range(2)
    ]
    done = finish(*ranks)
    assert [code for code, _, _ in done] == [0, 0], done
    assert [set(one["listeners"]) for one in reports(tmp_path)] == [{own}, {own}]
