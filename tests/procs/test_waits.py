"""Waits end: by Ctrl-C, by the death of a peer, by a timeout, and by disagreement. With real processes on gloo."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import collectives
from paceline.collectives import TorchDistTransport, Transport, finish
from paceline.collectives.torch_store import store_of
from paceline.errors import CollectiveMismatch, PeerAbsent, PeerLost
from tests.interrupt import interrupt_blocked_rank
from tests.pool import Pool, RankFailed


def world_transport() -> TorchDistTransport:
    assert dist.group.WORLD is not None
    return TorchDistTransport(dist.group.WORLD)


def say(word: str, value: object = "") -> None:
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    assert store is not None
    store.set(word, str(value))


def hear(word: str) -> str:
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    assert store is not None
    return store.get(word).decode()


def wait_in(kind: str, transport: Transport, timeout_s: float | None = None) -> None:
    if kind == "gloo":
        work = transport.all_reduce(torch.ones(1000))
        finish(work, what="bucket 1 of backward 17", watch=transport.watch, timeout_s=timeout_s)
    else:
        collectives.barrier(timeout=timeout_s)


# ----------------------------------------------------------------------------------------------------------- a death


def lose_one(rank: int, size: int, kind: str) -> tuple[str, tuple[int, ...], float]:
    transport = world_transport()
    wait_in(kind, transport)
    if rank == 1:
        hear("0 waits"), hear("2 waits")
        say("killed at", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    say(f"{rank} waits")
    with pytest.raises(PeerLost) as caught:
        wait_in(kind, transport)
    return str(caught.value), caught.value.ranks, time.monotonic() - float(hear("killed at"))


@pytest.mark.parametrize("kind", ["gloo", "store"])
def test_survivors_name_the_killed_rank(procs: Pool, kind: str) -> None:
    outcomes = procs(3).attempt(lose_one, kind)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        message, ranks, seconds = outcome.value
        assert ranks == (1,)
        assert message.startswith("rank 1 (pid ")
        assert seconds < 3


# ---------------------------------------------------------------------------------------------------------- absence


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def miss_a_stopped_one(rank: int, size: int) -> list[str]:
    transport = world_transport()
    if rank == 1:
        say("pid", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_in("gloo", transport)
        return []
    heard, pid = Lines(), int(hear("pid"))
    logging.getLogger("paceline").addHandler(heard)
    work = transport.all_reduce(torch.ones(1000))
    try:
        with pytest.raises(PeerAbsent) as caught:
            finish(work, what="bucket 1 of backward 17", watch=transport.watch, timeout_s=4)
        assert caught.value.ranks == (1,)
        heard.lines.append(str(caught.value))
    finally:
        logging.getLogger("paceline").removeHandler(heard)
        os.kill(pid, signal.SIGCONT)
    finish(work, what="bucket 1 of backward 17", watch=transport.watch, timeout_s=20)
    return heard.lines


def test_a_stopped_rank_is_named_and_missed_at_the_timeout(procs: Pool) -> None:
    report, error = procs(2).run(miss_a_stopped_one)[0]
    assert report.startswith("rank 0 has waited 3")
    assert "s in bucket 1 of backward 17 for rank 1, which is in no collective (stopped, pid " in report
    assert error.startswith("waited 4")
    assert "in bucket 1 of backward 17 for rank 1, which exceeds timeout=4 s" in error


def miss_in_a_barrier(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(PeerAbsent, match="rank 1") as caught:
            collectives.barrier(timeout=0.4)
        assert caught.value.ranks == (1,)
        say("missed")
    else:
        hear("missed")
    collectives.barrier(timeout=20)  # a call that was given up does not count: the ranks still agree


def test_a_barrier_may_be_tried_again_after_its_timeout(procs: Pool) -> None:
    procs(2).run(miss_in_a_barrier)


# -------------------------------------------------------------------------------- the rank that hosts the store


def form_with_store_on_rank_0(rank: int, folder: str) -> Any:
    meeting = dist.FileStore(str(Path(folder, "meeting")), 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return meeting


def fall_with_the_store(rank: int, size: int, folder: str, kind: str, by: int) -> tuple[str, tuple[int, ...], float]:
    meeting = form_with_store_on_rank_0(rank, folder)
    transport = world_transport()
    wait_in(kind, transport)
    if rank == 0:
        meeting.set("pid", str(os.getpid()))
        meeting.get("waits")
        meeting.set("at", str(time.monotonic()))
        os.kill(os.getpid(), by)
        meeting.get("over")
        return "", (), 0.0
    pid = int(meeting.get("pid"))
    meeting.set("waits", "")
    if by == signal.SIGSTOP:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
    try:
        with pytest.raises(PeerAbsent if by == signal.SIGSTOP else PeerLost) as caught:
            wait_in(kind, transport, timeout_s=2 if by == signal.SIGSTOP else None)
        return str(caught.value), caught.value.ranks, time.monotonic() - float(meeting.get("at"))
    finally:
        if by == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            meeting.set("over", "")


@pytest.mark.parametrize("kind", ["gloo", "store"])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_the_host_of_the_store_may_die_or_stop(procs: Pool, tmp_path: Path, kind: str, by: signal.Signals) -> None:
    outcomes = procs(2).attempt(fall_with_the_store, str(tmp_path), kind, int(by), group=False)
    assert outcomes[1].ok, outcomes[1].error
    message, ranks, seconds = outcomes[1].value
    assert ranks == (0,), message
    assert "rank 0" in message
    assert seconds < 4


# ---------------------------------------------------------------------------------------------------- disagreement


def cross_over(rank: int, size: int) -> str:
    """Rank 0 waits for a broadcast and rank 1 for a sum, which gloo matches with nothing."""
    transport = world_transport()
    wait_in("gloo", transport)
    if rank == 0:
        work = transport.broadcast(torch.ones(10), root=1)
    else:
        work = transport.all_reduce(torch.ones(10))
    with pytest.raises(CollectiveMismatch) as caught:
        finish(work, what=("buffers" if rank == 0 else "bucket 0"), watch=transport.watch, timeout_s=20)
    return str(caught.value)


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "kind": (lambda: collectives.barrier(), lambda: collectives.all_reduce(torch.ones(2))),
    "shape": (lambda: collectives.all_reduce(torch.ones(2)), lambda: collectives.all_reduce(torch.ones(1, 2))),
    "dtype": (lambda: collectives.all_reduce(torch.ones(2)), lambda: collectives.all_reduce(torch.ones(2).double())),
    "op": (lambda: collectives.all_reduce(torch.ones(2)), lambda: collectives.all_reduce(torch.ones(2), "max")),
    "root": (lambda: collectives.broadcast(torch.ones(2)), lambda: collectives.broadcast(torch.ones(2), src=1)),
    "part": (lambda: collectives.all_gather(torch.ones(2)), lambda: collectives.all_gather(torch.ones(3))),
}


def differ(rank: int, size: int) -> dict[str, str]:
    messages = {}
    for name, pair in PAIRS.items():
        with pytest.raises(CollectiveMismatch) as caught:
            pair[rank]()
        messages[name] = str(caught.value)
    collectives.barrier()
    return messages


def test_calls_that_differ_raise_on_every_rank_and_harm_nothing(procs: Pool) -> None:
    first, second = procs(2).run(differ)
    assert first == second
    assert "rank 0 called barrier() at procs/test_waits.py:" in first["kind"]
    assert "; rank 1 called all_reduce(sum) of float32[2] at procs/test_waits.py:" in first["kind"]
    assert "all_reduce(sum) of float32[1, 2]" in first["shape"]
    assert "all_reduce(sum) of float64[2]" in first["dtype"]
    assert "all_reduce(max) of float32[2]" in first["op"]
    assert "broadcast(src=1)" in first["root"]


def swapped(rank: int, size: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: collectives.all_reduce(torch.ones(2)),
        lambda: collectives.broadcast(torch.ones(2)),
    ]
    for call in calls if rank == 0 else reversed(calls):
        with pytest.raises(CollectiveMismatch):
            call()


def test_a_swapped_order_raises_on_every_rank(procs: Pool) -> None:
    procs(2).run(swapped)


def agree(rank: int, size: int) -> tuple[Any, ...]:
    table = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)  # not contiguous
    total = collectives.all_reduce(table)
    assert total is table
    mean = collectives.all_reduce(torch.tensor([float(rank)]), "mean", timeout=20)
    parts = collectives.all_gather(torch.full((2, 1), float(rank)))
    sent = collectives.broadcast(torch.tensor([float(rank)]), src=size - 1)
    empty = collectives.all_gather(torch.empty(0, 3))
    return total.tolist(), mean.item(), [part.tolist() for part in parts], sent.item(), [e.shape for e in empty]


def test_checked_collectives_do_what_they_say(procs: Pool) -> None:
    results = procs(2).run(agree)
    assert results[0] == results[1]
    total, mean, parts, sent, empty = results[0]
    assert total == [[0, 9], [3, 12], [6, 15]]
    assert (mean, sent) == (0.5, 1.0)
    assert parts == [[[0.0], [0.0]], [[1.0], [1.0]]]
    assert empty == [(0, 3), (0, 3)]


def count_keys(rank: int, size: int) -> tuple[int, int]:
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    assert store is not None
    counts = []
    for _ in range(2):
        for _ in range(10):
            collectives.barrier()
        wait_in("gloo", world_transport())
        counts.append(store.num_keys())
        wait_in("gloo", world_transport())
    return counts[0], counts[1]


def test_the_store_does_not_grow(procs: Pool) -> None:
    for before, after in procs(2).run(count_keys):
        assert abs(after - before) <= 2


def test_a_deadlock_between_transports_raises_on_every_rank(procs: Pool) -> None:
    outcomes = procs(2).attempt(cross_over)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        assert "rank 0 issued broadcast(root=1) of float32[10] as collective 2, and waits in buffers" in outcome.value
        assert "rank 1 issued all_reduce(sum) of float32[10] as collective 2" in outcome.value


# ----------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_a_barrier(rank: int, size: int) -> float:
    if rank == 1:
        pid = int(hear("waits"))
        say("sent at", time.monotonic())
        os.kill(pid, signal.SIGINT)
        hear("interrupted")
        return 0.0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        say("waits", os.getpid())
        with pytest.raises(KeyboardInterrupt):
            collectives.barrier()
    finally:
        signal.signal(signal.SIGINT, before)
    ended = time.monotonic()
    say("interrupted")
    return ended - float(hear("sent at"))


@pytest.mark.alone
def test_ctrl_c_ends_a_checked_wait(procs: Pool) -> None:
    assert procs(2).run(interrupt_a_barrier)[0] < 0.3


BLOCKED = """
import sys
import torch, torch.distributed as dist
from paceline.collectives import TorchDistTransport, finish
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
transport = TorchDistTransport(dist.group.WORLD)
finish(transport.all_reduce(torch.ones(1000)), what="warm up", watch=transport.watch)
if rank == 1:
    print("ready", flush=True)
    sys.stdin.read()
    raise SystemExit
work = transport.all_reduce(torch.ones(1000))
try:
    print("ready", flush=True)
    finish(work, what="a wait without end", watch=transport.watch)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if sys.argv[3] == "destroy":
        dist.destroy_process_group()
    sys.exit(7)
"""


@pytest.mark.alone
@pytest.mark.parametrize("then", ["exit", "destroy"])
def test_ctrl_c_ends_a_blocked_collective_and_the_process_exits(tmp_path: Path, then: str) -> None:
    interrupt_blocked_rank(BLOCKED, str(tmp_path / "store"), then)


def test_a_group_with_an_abandoned_collective_can_be_destroyed(procs: Pool) -> None:
    outcomes = procs(2).attempt(abandon_and_destroy)
    assert not isinstance(outcomes[0].error, RankFailed), outcomes[0].error
    assert outcomes[0].ok, outcomes[0].error
    assert outcomes[0].value < 1


def abandon_and_destroy(rank: int, size: int) -> float:
    transport = world_transport()
    wait_in("gloo", transport)
    if rank == 1:
        hear("given up")
        return 0.0
    store = store_of(transport.users_group)
    assert store is not None
    with pytest.raises(PeerAbsent):
        wait_in("gloo", transport, timeout_s=0.3)
    started = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - started
    store.set("given up", "")
    return took
