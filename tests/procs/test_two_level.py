"""Two hosts with several ranks each: two network namespaces of this machine, joined by a rate-limited link."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import Op, TorchDistTransport, Transport, finish
from paceline.collectives.choose import choose
from paceline.collectives.two_level import TwoLevelTransport
from paceline.errors import CollectiveError, CollectiveMismatch, PeerLost, UsageError
from tests.contracts.test_transport import faults_of
from tests.hosts import INTERFACE, Host, NotPossible, joined_hosts
from tests.procs.test_lane_sum import wrong_sums

CPU = torch.device("cpu")
PORT = 29500
RANKS = 4
UNEVEN = 3  # one of the first host's two ranks owns no slice, since the second host has one
VICTIM = 3
MIB = 1 << 20


def start_rank(host: Host, rank: int, body: str, report: Path, store: str) -> "subprocess.Popen[str]":
    code = f"import sys; sys.path[:] = {sys.path!r}; from tests.procs.test_two_level import {body}; {body}()"
    environ = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    command = host.command([sys.executable, "-W", "error", "-c", code, str(rank), str(report), store])
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two that reach each other at 1 Gbit/s."""
    try:
        with joined_hosts(2) as made:
            made[1].slow_down("1gbit", burst="512kb")
            yield made
    except NotPossible as error:
        pytest.skip(str(error))


# -------------------------------------------------------------------------------------------------- on every rank


def join_world(size: int) -> tuple[TorchDistTransport, Path]:
    rank, report, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, PORT, size, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    assert dist.group.WORLD is not None
    return TorchDistTransport(dist.group.WORLD), report


def leave_world(rank: int, report: Path, found: object, others: Iterable[int]) -> None:
    """Leave at once: with a rank in it that is dead or has given up, a group cannot be taken down in good order."""
    report.write_text(json.dumps(found))
    until = time.monotonic() + 10
    while rank == 0 and time.monotonic() < until:  # its process hosts the store, which the others still ask who died
        if all(report.with_name(str(peer)).exists() for peer in others):
            break
        time.sleep(0.01)
    os._exit(0)


def main() -> None:
    base, report = join_world(RANKS)
    found: dict[str, Any] = {}
    with pytest.raises(UsageError) as refused:
        choose(base, "shm", [CPU], 20)
    found["refused"] = str(refused.value)
    transport = choose(base, "auto", [CPU], 20)
    found["kind"] = type(transport).__name__
    found["faults"] = faults_of(transport)
    found["wrong"], found["digest"] = reduce_all_sorts(transport)
    found["wrong lanes"] = wrong_sums(transport)
    found["sent"] = {
        "two levels": bytes_sent(transport, transport.allocate(4 * MIB, torch.float32, CPU)),
        "one level": bytes_sent(base, torch.zeros(4 * MIB)),
    }
    another = transport.dup(20)
    assert isinstance(another, TwoLevelTransport)
    settle(another, another.all_reduce(another.allocate(10, torch.float32, CPU)))
    another.close()
    found["mismatch"] = learned(transport.dup(20), [0, 1], "size")
    found["lost"] = lose_one(transport, report)
    leave_world(base.rank, report, found, [peer for peer in range(RANKS) if peer != VICTIM])


USUAL = (1000, torch.float32, Op.SUM)
ODD = {"size": (10, torch.float32, Op.SUM), "dtype": (1000, torch.float64, Op.SUM), "op": (1000, torch.float32, Op.MAX)}


def differ() -> None:
    base, report = join_world(UNEVEN)
    cases = (([2], "size"), ([0, 1], "size"), ([0, 1], "dtype"), ([0, 1], "op"), ([1], "size"))
    found = {f"{what} {who}": learned(choose(base, "two-level", [CPU], 20), who, what) for who, what in cases}
    leave_world(base.rank, report, found, range(UNEVEN))


def learned(transport: Transport, who: list[int], what: str) -> tuple[str, tuple[int, ...]]:
    """What all ranks learn when those of `who` call something else."""
    numel, dtype, op = ODD[what] if transport.rank in who else USUAL
    settle(transport, transport.all_reduce(transport.allocate(8, torch.float32, CPU)))
    flat = transport.allocate(numel, dtype, CPU)
    with pytest.raises(CollectiveMismatch) as raised:
        settle(transport, transport.all_reduce(flat, op))
    with pytest.raises(CollectiveError, match="was abandoned"):
        transport.all_reduce(flat, op)
    transport.close()
    return str(raised.value), raised.value.ranks


def settle(transport: Transport, *works: Any) -> None:
    for work in works:
        finish(work, what="a bucket", watch=transport.watch, timeout_s=20)


def reduce_all_sorts(transport: Transport) -> tuple[list[str], str]:
    wrong, digest = [], hashlib.sha256()
    begun = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        for numel in (1, 5, 33, 100_003):
            for op in (Op.SUM, Op.MEAN) if dtype.is_complex else (Op.SUM, Op.MEAN, Op.MAX):
                parts = [torch.arange(numel).remainder(7).add(rank).to(dtype) for rank in range(RANKS)]
                flat = transport.allocate(numel, dtype, CPU).copy_(parts[transport.rank])
                stacked = torch.stack([part.to(torch.complex128) if dtype.is_complex else part for part in parts])
                expected = {
                    Op.SUM: lambda s: s.sum(0),
                    Op.MEAN: lambda s: s.sum(0) / RANKS,
                    Op.MAX: lambda s: s.amax(0),
                }
                begun.append((f"{op} {dtype} {numel}", transport.all_reduce(flat, op), flat, expected[op](stacked)))
                transport.progress()
    for what, work, flat, expected_sum in begun:
        settle(transport, work)
        if not torch.equal(flat, expected_sum.to(flat.dtype)):
            wrong.append(what)
        digest.update(bytes(flat.view(torch.uint8)[:1000].tolist()))
    return wrong, digest.hexdigest()


def bytes_sent(transport: Transport, flat: torch.Tensor) -> float:
    """What this host sent for one all_reduce, as a multiple of the tensor's bytes."""
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    settle(transport, transport.all_reduce(flat))
    dist.barrier()
    before = int(counter.read_text())
    settle(transport, transport.all_reduce(flat))
    dist.barrier()
    return (int(counter.read_text()) - before) / flat.nbytes


def lose_one(transport: Transport, report: Path) -> list[Any]:
    flat = transport.allocate(MIB, torch.float32, CPU)
    settle(transport, transport.all_reduce(flat))
    died = report.with_name("died")
    if transport.rank == VICTIM:
        time.sleep(0.3)
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        settle(transport, transport.all_reduce(flat))
    except PeerLost as error:
        return [list(error.ranks), time.monotonic() - float(died.read_text()), str(error)]
    return []


# ------------------------------------------------------------------------------------------------------ looking at it


def start(hosts: list[Host], folder: Path, body: str, size: int) -> list[str]:
    """Run `body` on `size` ranks, the first half of them on the first host. Returns what they wrote to stderr."""
    first = -(-size // 2)
    ranks = [start_rank(hosts[rank // first], rank, body, folder / str(rank), hosts[0].address) for rank in range(size)]
    try:
        return [rank.communicate(timeout=50)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def run(hosts: list[Host], folder: Path) -> list[dict[str, Any] | None]:
    errors = start(hosts, folder, "main", RANKS)
    for number, error in enumerate(errors):
        assert number == VICTIM or (folder / str(number)).exists(), error
    return [json.loads((folder / str(rank)).read_text()) if rank != VICTIM else None for rank in range(RANKS)]


def each(found: list[dict[str, Any] | None], look: Callable[[dict[str, Any]], object]) -> list[object]:
    return [look(one) for one in found if one is not None]


def test_two_hosts_reduce_in_two_levels(hosts: list[Host], tmp_path: Path) -> None:
    found = run(hosts, tmp_path)
    survivors = RANKS - 1
    for message in each(found, lambda one: one["refused"]):
        assert "transport='shm' cannot work here: rank 2 runs in another container than rank 0" in str(message)
    assert each(found, lambda one: one["kind"]) == ["TwoLevelTransport"] * survivors
    assert each(found, lambda one: one["faults"]) == [{}] * survivors
    assert each(found, lambda one: one["wrong"]) == [[]] * survivors
    assert each(found, lambda one: one["wrong lanes"]) == [[]] * survivors
    assert len(set(each(found, lambda one: one["digest"]))) == 1, "all ranks have the same bits"
    for sent in each(found, lambda one: one["sent"]):
        assert isinstance(sent, dict)
        assert sent["two levels"] < 1.15, "a bucket crosses once"
        assert sent["two levels"] < 0.8 * sent["one level"]
    for mismatch in each(found, lambda one: one["mismatch"]):
        assert isinstance(mismatch, list)
        assert "ranks 0, 1 (one host) called all_reduce(sum) of float32[10]; ranks 2, 3 (one host)" in mismatch[0]
        assert mismatch[1] == [0, 1, 2, 3]
    for lost in each(found, lambda one: one["lost"]):
        assert isinstance(lost, list)
        assert lost[0] == [VICTIM], lost
        assert lost[1] < 5


def test_hosts_that_differ_all_learn_it(hosts: list[Host], tmp_path: Path) -> None:
    errors = start(hosts, tmp_path, "differ", UNEVEN)
    usual, small = "all_reduce(sum) of float32[1000]", "all_reduce(sum) of float32[10]"
    for rank, error in enumerate(errors):
        assert (tmp_path / str(rank)).exists(), error
        found = json.loads((tmp_path / str(rank)).read_text())
        told = {case: message.partition(". Every rank must")[0] for case, (message, _) in found.items()}
        first = "ranks 0, 1 (one host) called"
        assert told == {
            "size [2]": f"{first} {usual}; rank 2 called {small}",
            "size [0, 1]": f"{first} {small}; rank 2 called {usual}",
            "dtype [0, 1]": f"{first} all_reduce(sum) of float64[1000]; rank 2 called {usual}",
            "op [0, 1]": f"{first} all_reduce(max) of float32[1000]; rank 2 called {usual}",
            "size [1]": f"rank 0 called {usual}; rank 1 called {small}"
            if rank < 2
            else f"{first} different collectives; rank 2 called {usual}",
        }
        assert [ranks for _, ranks in found.values()] == [[0, 1, 2]] * 4 + [[0, 1] if rank < 2 else [0, 1, 2]]
