"""The same script under `paceline run`, with torch's own rendezvous and with ours, on one machine and on two."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.procs.test_launch import says

PORT = 29400
ADDRESSES = ("10.201.78.1", "10.201.78.2")  # known inside the two namespaces only
PATIENCE_S = 50.0
SECRET = "a secret of the test, long enough"

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


def start(folder: Path, *flags: str, prefix: tuple[str, ...] = (), secret: str = SECRET) -> "subprocess.Popen[str]":
    command = [*prefix, sys.executable, "-m", "paceline.cli.run", "--log-dir", str(folder / "runs"), *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PACELINE_JOB_SECRET": secret},
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


# --------------------------------------------------------------------------------------------------- two machines


@dataclass(frozen=True)
class Machine:
    namespace: str
    interface: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}`: {done.stderr.strip()}")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces that reach each other through a pair of virtual interfaces, gone afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here to make network namespaces with")
    mark = secrets.token_hex(3)
    first, second = (Machine(f"paceline-{mark}-{side}", f"pr{mark}{side}") for side in "ab")
    with ExitStack() as undo:
        try:
            for machine in (first, second):
                sh("ip", "netns", "add", machine.namespace)
                undo.callback(sh, "ip", "netns", "del", machine.namespace)
            sh("ip", "link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
            for machine, address in zip((first, second), ADDRESSES, strict=True):
                inside = ("ip", "-n", machine.namespace)
                sh("ip", "link", "set", machine.interface, "netns", machine.namespace)
                sh(*inside, "addr", "add", f"{address}/24", "dev", machine.interface)
                sh(*inside, "link", "set", "lo", "up")
                sh(*inside, "link", "set", machine.interface, "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield first, second


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def both(machines: tuple[Machine, Machine], tmp_path: Path) -> Callable[..., list["subprocess.Popen[str]"]]:
    """`both(*words)` starts a launcher on each machine, with one rank each."""

    def begin(*words: str, secret: tuple[str, str] = (SECRET, SECRET)) -> list["subprocess.Popen[str]"]:
        where = ("--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(PORT), "-n", "1")
        return [
            start(
                tmp_path / str(node),
                *where,
                "--node-rank",
                str(node),
                *words,
                prefix=machine.prefix,
                secret=secret[node],
            )
            for node, machine in enumerate(machines)
        ]

    return begin


def listening_in(machine: Machine) -> set[str]:
    command = [*machine.prefix, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    fields = [row.split() for row in rows]
    return {field[1] for field in fields if len(field) > 9 and field[3] == "0A"}


def test_two_machines_reduce_and_a_failure_on_one_restarts_both(
    both: Callable[..., list["subprocess.Popen[str]"]], tmp_path: Path
) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    done = finish(*both("--max-restarts", "1", str(tmp_path / "ours.py"), str(tmp_path), "1"))
    assert [code for code, _, _ in done] == [0, 0], done
    for node, (_, out, err) in enumerate(done):
        assert "rank 1 raised RuntimeError: as asked; restart 1: all ranks start again" in err
        assert f"[{node}] done" in out
    own = [socket.inet_aton(address)[::-1].hex().upper() for address in ADDRESSES]
    for attempt in range(2):
        found = reports(tmp_path, attempt)
        seats = [(one["sum"], one["rank"], one["size"], one["local"]) for one in found]
        assert seats == [(2.0, 0, 2, 0), (2.0, 1, 2, 0)]
        for node, one in enumerate(found):
            # gloo listens on the interface that joins the machines, the store on loopback, nobody on all interfaces.
            assert own[node] in one["listeners"]
            assert set(one["listeners"]) <= {"0100007F", own[node]}


def test_only_the_sealed_port_can_be_reached(
    both: Callable[..., list["subprocess.Popen[str]"]], machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """While ranks that use no gloo run, the one listener off loopback is the launcher's; garbage does not hurt it."""
    (tmp_path / "wait.py").write_text(
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / ('up' + os.environ['RANK'])).touch()\n"
        "while not (folder / 'go').exists(): time.sleep(0.02)\n"
    )
    started = both(str(tmp_path / "wait.py"))
    try:
        until = time.monotonic() + PATIENCE_S
        while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until
            assert all(process.poll() is None for process in started), finish(*started)
            time.sleep(0.02)
        own = socket.inet_aton(ADDRESSES[0])[::-1].hex().upper()
        off_loopback = [{at for at in listening_in(m) if not at.startswith("0100007F")} for m in machines]
        assert off_loopback == [{f"{own}:{PORT:04X}"}, set()]
        noise = (
            "import os, socket\n"
            "for data in (b'GET / HTTP/1.0\\r\\n\\r\\n', os.urandom(100000), b'', b'\\0' * 64):\n"
            f"    with socket.create_connection(({ADDRESSES[0]!r}, {PORT})) as stranger:\n"
            "        try:\n"
            "            stranger.sendall(data); stranger.shutdown(1); stranger.settimeout(8)\n"
            "            while stranger.recv(4096): pass\n"
            "        except TimeoutError: raise\n"
            "        except OSError: pass\n"  # it was refused before all was said: reset, or not connected any more
        )
        subprocess.run([*machines[1].prefix, sys.executable, "-c", noise], check=True, timeout=40)
        (tmp_path / "go").touch()
    finally:
        done = finish(*started)
    assert [code for code, _, _ in done] == [0, 0], done
    assert done[0][2].count("refused a connection from 10.201.78.2") == 4


def test_another_secret_is_refused(both: Callable[..., list["subprocess.Popen[str]"]], tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text("raise SystemExit('must not run')")
    head, member = both(str(tmp_path / "ours.py"), secret=(SECRET, "a different secret, also long"))
    try:
        _, err = member.communicate(timeout=PATIENCE_S)
        assert member.returncode == 2
        where = f"{ADDRESSES[0]}:{PORT}"
        assert err == f"paceline run: machine 0 at {where} refused this one: the launcher there has another secret\n"
        head.send_signal(signal.SIGINT)
        head.communicate(timeout=PATIENCE_S)
        assert head.returncode == 130
    finally:
        finish(head, member)


def test_a_lost_machine_ends_the_other(both: Callable[..., list["subprocess.Popen[str]"]], tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, 'up' + os.environ['RANK']).touch()\n"
        "time.sleep(600)\n"
    )
    head, member = both("--max-restarts", "2", str(tmp_path / "wait.py"))
    try:
        until = time.monotonic() + PATIENCE_S
        while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until
            time.sleep(0.02)
        lost_at = time.monotonic()
        member.kill()
        _, err = head.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - lost_at < 5
        assert head.returncode == 1
        assert "machine 1 was lost: its launcher closed the connection" in err
    finally:
        finish(head, member)


def test_a_store_listens_at_the_address_that_was_named(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Whoever starts the ranks: the store of rank 0 is not on all interfaces, where torch would put it."""
    (tmp_path / "ours.py").write_text(OURS)
    here, own = machines[0], socket.inet_aton(ADDRESSES[0])[::-1].hex().upper()
    seats = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    ranks = [
        subprocess.Popen(
            [*here.prefix, sys.executable, str(tmp_path / "ours.py"), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **seats,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": here.interface,
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        )
        for rank in range(2)
    ]
    done = finish(*ranks)
    assert [code for code, _, _ in done] == [0, 0], done
    assert [set(one["listeners"]) for one in reports(tmp_path)] == [{own}, {own}]
