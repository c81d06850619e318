"""The watch, with the ranks' records on a store in memory and no waiting."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.distributed_c10d import Store

from paceline.collectives import watch as watch_module
from paceline.collectives.peers import Identity, PeerRecord, Wait
from paceline.collectives.store_call import StoreCall
from paceline.collectives.watch import ANSWER_WITHIN_S, Reports, StoreWatch
from paceline.errors import CollectiveError, CollectiveMismatch, PeerAbsent, PeerLost

CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:35532. This is typically …")


class Counting(Store):
    """Counts the calls that reach a store."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HashStore()
        self.calls: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.calls.append("set")
        self.inner.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.calls.append("check")
        return bool(self.inner.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append("multi_get")
        return list(self.inner.multi_get(keys))


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture(autouse=True)
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(watch_module, "ANSWER_WITHIN_S", 0.1)


def post(store: Store, rank: int, record: PeerRecord) -> None:
    store.set(f"paceline/rank/{rank}", record.encode())


def ended() -> Identity:
    """The identity of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = replace(Identity.own(), pid=child.pid)
    child.communicate(b"\n")
    return identity


def elsewhere() -> Identity:
    return replace(Identity.own(), host="another", hostname="far", pid=1)


def waits(what: str) -> list[Wait]:
    return [Wait(what, since=1000.0)]


def test_a_short_wait_costs_no_traffic() -> None:
    store = Counting()
    watch = StoreWatch(store, 0, 2)
    store.calls.clear()
    for tenth in range(5):
        watch.look("bucket 0", tenth / 10)
    watch.left()
    assert store.calls == []


def test_a_wait_is_posted_and_taken_back(store: HashStore) -> None:
    watch, other = StoreWatch(store, 0, 2), StoreWatch(store, 1, 2)
    watch.look("bucket 0", 0.6)
    assert other.absent() == [0]
    other.look("bucket 0", 0.6)
    assert other.absent() == []
    watch.left()
    assert other.absent() == [0]


def test_reports_grow_rare() -> None:
    reports = Reports()
    told = [second for second in range(1001) if reports.due(float(second))]
    assert told == [3, 10, 30, 100, 300, 1000]


def test_absent_ranks_are_reported_by_name(store: HashStore, caplog: pytest.LogCaptureFixture) -> None:
    watch = StoreWatch(store, 0, 4)
    post(store, 1, PeerRecord(Identity.own(), last="bucket 7 of backward 1"))
    post(store, 2, PeerRecord(elsewhere(), waits=waits("buffers")))
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for waited_s in (2.9, 3.2, 3.3, 9.9):
            watch.look("bucket 1", waited_s)
    (line,) = caplog.messages
    assert line.startswith("rank 0 has waited 3.2 s in bucket 1 for rank 1, which is in no collective (alive, pid ")
    assert "; last wait: bucket 7 of backward 1); rank 2, which has waited " in line
    assert "s in buffers; rank 3, which has not announced itself to this group yet" in line
    assert line.endswith(" in test_absent_ranks_are_reported_by_name")


def test_without_a_store_waits_are_reported_without_names(caplog: pytest.LogCaptureFixture) -> None:
    watch = StoreWatch(None, 0, 2)
    watch.look("bucket 1", 3.2)
    assert "for a rank that cannot be named" in caplog.text
    assert watch.absent() == []
    watch.left()


def test_a_store_that_is_gone_is_not_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = StoreWatch(FileStore(str(tmp_path / "store"), 2), 0, 2)
    (tmp_path / "store").unlink()
    (tmp_path / "store").symlink_to("store")
    began = time.monotonic()
    error = watch.explain("bucket 0", 0.1, CLOSED)
    assert isinstance(error, PeerLost) and "it is not known which rank died" in str(error)
    assert time.monotonic() - began < ANSWER_WITHIN_S / 2
    assert not caplog.messages


def test_a_dead_peer_is_raised_by_name(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 3)
    gone = ended()
    post(store, 1, PeerRecord(Identity.own()))
    post(store, 2, PeerRecord(gone))
    with pytest.raises(PeerLost, match=rf"^rank 2 \(pid {gone.pid} on host .*waited 0.6 s in bucket 0") as caught:
        watch.look("bucket 0", 0.6)
    assert caught.value.ranks == (2,)


def test_a_rank_that_is_behind_itself_looks_for_dead_peers_alone(
    store: HashStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It reports no rank that is merely late."""
    watch = StoreWatch(store, 0, 2)
    post(store, 1, PeerRecord(Identity.own()))
    for waited_s in (0.6, 3.1, 30.0):
        watch.look_for_lost("bucket 0", waited_s)
    assert not caplog.records
    post(store, 1, PeerRecord(ended()))
    with pytest.raises(PeerLost, match="rank 1") as raised:
        watch.look_for_lost("bucket 0", 0.6)
    assert raised.value.ranks == (1,)


def test_a_process_number_used_again_is_not_the_peer(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 2)
    post(store, 1, PeerRecord(replace(Identity.own(), started="1")))
    with pytest.raises(PeerLost):
        watch.look("bucket 0", 0.6)


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(open('/proc/self/stat').read())"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    started = child.stdout.read().decode().rpartition(")")[2].split()[19]
    identity = replace(Identity.own(), pid=child.pid, started=started)
    with child:
        # Its output has ended, so it is about to become a zombie: nobody has reaped it yet.
        while identity.state() != "dead":
            threading.Event().wait(0.01)


def test_a_broken_connection_names_the_dead_rank(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 3)
    post(store, 1, PeerRecord(ended()))
    post(store, 2, PeerRecord(Identity.own()))
    error = watch.explain("bucket 0", 0.2, CLOSED)
    assert isinstance(error, PeerLost)
    assert error.ranks == (1,)
    assert "Connection closed by peer" in str(error)


def test_a_survivor_that_went_down_is_not_blamed(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 3)
    post(store, 1, PeerRecord(ended()))
    post(store, 2, PeerRecord(ended(), blames=[1]))
    error = watch.explain("bucket 0", 0.2, CLOSED)
    assert isinstance(error, PeerLost)
    assert error.ranks == (1,)


def test_a_rank_on_another_host_is_known_by_those_who_blame_it(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 4)
    post(store, 1, PeerRecord(elsewhere()))
    post(store, 2, PeerRecord(elsewhere()))
    post(store, 3, PeerRecord(elsewhere(), answers=True, blames=[2]))
    with pytest.raises(PeerLost) as caught:
        watch.look("bucket 0", 0.6)
    assert caught.value.ranks == (2,)


def test_a_rank_on_another_host_that_does_not_answer_is_named(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 4)
    post(store, 1, PeerRecord(elsewhere()))
    post(store, 2, PeerRecord(elsewhere(), answers=True))
    post(store, 3, PeerRecord(Identity.own()))
    error = watch.explain("bucket 0", 0.2, CLOSED)
    assert isinstance(error, PeerLost)
    assert error.ranks == (1,)


def test_a_rank_that_never_announced_itself_is_named_when_a_connection_breaks(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 3)
    post(store, 1, PeerRecord(Identity.own()))
    error = watch.explain("bucket 0", 0.2, CLOSED)
    assert isinstance(error, PeerLost)
    assert error.ranks == (2,)


def test_what_a_rank_blames_is_seen_by_the_others(store: HashStore) -> None:
    first, second = StoreWatch(store, 0, 3), StoreWatch(store, 1, 3)
    post(store, 2, PeerRecord(ended()))
    first.explain("bucket 0", 0.2, CLOSED)
    first.left()
    post(store, 2, PeerRecord(elsewhere()))
    with pytest.raises(PeerLost) as caught:
        second.look("bucket 0", 0.6)
    assert caught.value.ranks == (2,)


def test_the_transports_own_timeout_is_an_absence(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 2)
    StoreWatch(store, 1, 2)
    error = watch.explain(
        "bucket 0", 1800.0, RuntimeError("Timed out waiting 1800000ms for recv operation to complete")
    )
    assert isinstance(error, PeerAbsent)
    assert error.ranks == (1,)


def test_other_errors_keep_their_text(store: HashStore) -> None:
    error = StoreWatch(store, 0, 2).explain("bucket 0", 0.2, RuntimeError("Invalid scalar type"))
    assert type(error) is CollectiveError
    assert "bucket 0 failed on rank 0 after 0.2 s: Invalid scalar type" in str(error)


def deadlock(store: Store, calls: Callable[[StoreWatch, int], None], **settings: Any) -> list[str]:
    ranks = [StoreWatch(store, rank, 2, **settings) for rank in range(2)]
    for rank, watch in enumerate(ranks):
        calls(watch, rank)
    messages = []
    for _ in range(4):
        for rank, watch in enumerate(ranks):
            try:
                watch.look(f"thing {rank}", 0.6)
            except CollectiveMismatch as error:
                messages.append(str(error))
                watch.left()
    return messages


def test_ranks_that_issued_different_things_all_learn_it(store: HashStore) -> None:
    def calls(watch: StoreWatch, rank: int) -> None:
        watch.calls.began("all_reduce A")
        watch.calls.began("all_reduce B" if rank == 0 else "broadcast B")
        if rank == 0:
            watch.calls.began("all_reduce C")

    messages = deadlock(store, calls)
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert "rank 0 issued all_reduce B as collective 2, and waits in thing 0" in messages[0]
    assert "rank 1 issued broadcast B as collective 2, and waits in thing 1" in messages[0]


def test_waiting_for_different_parts_of_one_sequence_is_no_deadlock(store: HashStore) -> None:
    def calls(watch: StoreWatch, rank: int) -> None:
        for _ in range(40 + rank):
            watch.calls.began("all_reduce A")

    assert deadlock(store, calls) == []


def no_calls(watch: StoreWatch, rank: int) -> None:
    pass


def test_waiting_for_different_things_for_long_is_a_deadlock(store: HashStore) -> None:
    assert deadlock(store, no_calls) == []
    messages = deadlock(store, no_calls, settle_s=0.0)
    assert len(messages) == 2
    assert "rank 0 waits in thing 0 at unit/test_watch.py:" in messages[0]
    assert "; rank 1 waits in thing 1 at unit/test_watch.py:" in messages[0]


def test_a_connection_that_broke_after_a_verdict_is_told_as_the_verdict(store: HashStore) -> None:
    watch = StoreWatch(store, 0, 2)
    post(store, 1, PeerRecord(Identity.own()))
    watch.look("bucket 0", 0.6)
    ((wait,),) = [PeerRecord.decode(store.get("paceline/rank/0"), 0).waits]
    post(store, 1, PeerRecord(Identity.own(), verdict=("all ranks wait", [[wait.since], [1.0]])))
    error = watch.explain("bucket 0", 0.7, CLOSED)
    assert isinstance(error, CollectiveMismatch) and str(error) == "all ranks wait"


class Gone(Counting):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_points_to_its_host() -> None:
    watch = StoreWatch(Gone(), 1, 3, store_host=0)
    with pytest.raises(PeerLost, match="rank 0, which hosts the group's store") as caught:
        watch.look("bucket 0", 0.6)
    assert caught.value.ranks == (0,)


def test_a_store_that_is_gone_without_a_known_host_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StoreWatch(Gone(), 1, 3)
    for waited_s in (0.6, 1.2, 1.8):
        watch.look("bucket 0", waited_s)
    assert len(caplog.messages) == 1
    assert "lost the group's store" in caplog.text


class Silent(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.speak = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.speak.wait()
        return super().check(keys)


def test_a_store_that_does_not_answer_holds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    store = Silent()
    watch = StoreWatch(store, 1, 2, store_host=0)
    try:
        watch.look("bucket 0", 0.6)
        assert watch.absent() == [0]
        watch.look("bucket 0", 3.1)
        assert "for rank 0, which hosts the group's store and does not answer" in caplog.text
        watch.left()
    finally:
        store.speak.set()


def test_a_store_call_raises_where_it_is_waited_for() -> None:
    def fail(call: StoreCall[None]) -> None:
        raise RuntimeError("no")

    call = StoreCall(fail)
    with pytest.raises(RuntimeError, match="no"):
        call.wait(5)
