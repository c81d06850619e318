"""One member of an elastic job: what it hears from its launcher, what it waits for, and what it says."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerLost, WorldNotFormed
from paceline.launch.reports import ReportReader
from paceline.member import Member, in_elastic_job
from paceline.member_messages import (
    MAX_REASON,
    Finished,
    FromLauncher,
    Generation,
    MemberFailed,
    MemberFinished,
    MemberFormed,
    MemberLeft,
    MemberReady,
    MemberStore,
    Refused,
    Regroup,
    StoreAt,
    from_launcher,
    from_member,
    to_line,
)
from paceline.rank_report import MEMBER_NAME, MEMBERSHIP_NAME, REPORT_NAME, deliver, report

FROM_MEMBER = (
    MemberReady(-1, 0, False),
    MemberStore(3, 4711),
    MemberFormed(3),
    MemberFailed(3, 17, "ValueError: no"),
    MemberFinished(3, 100),
)
FROM_LAUNCHER: tuple[FromLauncher, ...] = (
    Generation(2, (4, 1), (4,), 17, False),
    Generation(2, (), (), -1, False),
    StoreAt(2, "127.0.0.1", 4711),
    MemberLeft(2, 1, "was killed by SIGKILL"),
    Regroup(2),
    Refused("too many losses"),
    Finished(2),
)


class Wire:
    """A member, with the ends of its pipes that a launcher has."""

    def __init__(self, number: int) -> None:
        inner, self.outer = os.pipe()
        self.said: list[bytes] = []
        self.member = Member(number, inner, self.take)
        self._inner = inner

    def take(self, line: bytes) -> bool:
        self.said.append(line)
        return True

    def tell(self, *messages: FromLauncher) -> None:
        os.write(self.outer, b"".join(map(to_line, messages)))

    def hang_up(self) -> None:
        os.close(self.outer)
        self.outer = -1

    def close(self) -> None:
        self.member.close()
        for descriptor in (self._inner, self.outer):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire(4)
    yield made
    made.close()


@pytest.mark.parametrize("message", FROM_LAUNCHER, ids=str)
def test_what_a_launcher_says_is_understood(message: FromLauncher) -> None:
    assert from_launcher(to_line(message)) == message


@pytest.mark.parametrize("message", FROM_MEMBER, ids=str)
def test_what_a_member_says_is_understood(message: Any) -> None:
    ((kind, said),) = ReportReader().feed(to_line(message))
    assert from_member(kind, said) == message
    assert from_launcher(to_line(message)) is None


def test_a_line_is_never_longer_than_a_pipe_keeps_whole() -> None:
    line = to_line(MemberFailed(1, 1, "\N{SNOWMAN}" * 9999))
    assert len(line) < 4000
    assert len(json.loads(line)["reason"]) == MAX_REASON


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
whole = json.loads(to_line(Generation(2, (4, 1), (4,), 17, False)))


@given(st.binary() | st.fixed_dictionaries(dict.fromkeys(whole, json_values)).map(lambda x: json.dumps(x).encode()))
def test_nonsense_is_no_message(line: bytes) -> None:
    assert from_launcher(line) is None


@given(st.sampled_from(sorted(whole)), json_values)
def test_a_message_with_one_wrong_field_is_none(name: str, value: Any) -> None:
    found = from_launcher(json.dumps({**whole, name: value}).encode())
    assert found is None or from_launcher(to_line(found)) == found


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"kind": "regroup", "generation": true}', b'{"kind": "regroup"}'])
def test_a_line_that_means_harm_is_no_message(line: bytes) -> None:
    assert from_launcher(line) is None
    assert ReportReader().feed(b"[" * 100_000 + b"\n") == []


def test_a_generation_is_awaited(wire: Wire) -> None:
    wire.tell(Generation(0, (1, 4), (1,), 0, False), StoreAt(0, "127.0.0.1", 99))
    found = wire.member.await_generation()
    assert (found.number, found.size, found.rank_of(4)) == (0, 2, 1)
    assert wire.member.await_store(0) == ("127.0.0.1", 99)
    assert wire.member.generation == found


def test_a_generation_without_this_member_is_none_of_its_business(wire: Wire) -> None:
    wire.tell(Generation(0, (1, 2), (1,), 0, False), Generation(1, (1, 2, 4), (1,), 3, False))
    assert wire.member.await_generation().number == 1


def test_only_a_later_generation_is_waited_for(wire: Wire) -> None:
    wire.tell(Generation(0, (4,), (4,), 0, False))
    wire.member.await_generation()
    later = threading.Timer(0.2, wire.tell, [Generation(1, (4, 5), (4,), 7, False)])
    later.start()
    assert wire.member.await_generation(after=0).number == 1
    later.join()


def test_a_death_while_a_group_is_formed_is_felt_at_once(wire: Wire) -> None:
    wire.tell(Generation(0, (1, 4), (1,), 0, False), MemberLeft(0, 1, "was killed by SIGKILL"))
    wire.member.await_generation()
    with pytest.raises(PeerLost, match="member 1 was killed by SIGKILL"):
        wire.member.await_store(0)


def test_who_has_left_is_told_to_all_who_ask(wire: Wire) -> None:
    received: list[MemberLeft] = []
    known = threading.Event()
    stop = wire.member.on_ended(received.append)
    wire.member.on_ended(lambda _: known.set())
    assert wire.member.ended(0) == ()
    wire.tell(MemberLeft(0, 1, "was killed by SIGKILL"))
    assert known.wait(10)
    stop()
    wire.tell(MemberLeft(1, 2, "left"), Regroup(1), Generation(1, (4,), (4,), 0, False))
    wire.member.await_generation(after=0)
    assert received == [MemberLeft(0, 1, "was killed by SIGKILL")]
    assert [one.member for one in wire.member.ended(1)] == [2]
    assert wire.member.wants_regroup(1)
    assert not wire.member.wants_regroup(2)


def test_a_refusal_ends_the_wait(wire: Wire) -> None:
    wire.tell(Refused("1 rank is left of at least 2"))
    with pytest.raises(WorldNotFormed, match="1 rank is left of at least 2"):
        wire.member.await_generation()


def test_nothing_is_formed_after_the_end(wire: Wire) -> None:
    assert not wire.member.finished
    wire.tell(Finished(3))
    with pytest.raises(WorldNotFormed, match="training is finished"):
        wire.member.await_generation()
    assert wire.member.finished


def test_a_launcher_that_has_gone_ends_the_wait(wire: Wire) -> None:
    wire.hang_up()
    with pytest.raises(WorldNotFormed, match="the launcher has ended"):
        wire.member.await_generation()


def test_messages_that_nobody_takes_are_an_error() -> None:
    wire = Wire(4)
    deaf = Member(5, wire._inner, lambda _: False)
    with pytest.raises(WorldNotFormed, match="member 5"):
        deaf.send(MemberFormed(0))
    deaf.close()
    wire.close()


def test_a_store_that_never_comes(wire: Wire) -> None:
    wire.tell(Generation(0, (1, 4), (1,), 0, False))
    wire.member.await_generation()
    with pytest.raises(WorldNotFormed, match="within 0.1 s where its store listens"):
        wire.member.await_store(0, timeout_s=0.1)


def test_what_must_arrive_waits_for_a_launcher_that_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = os.pipe()
    monkeypatch.setenv(REPORT_NAME, f"{outer}:{os.fstat(outer).st_ino}")
    report("large", data="x" * 100_000)  # fills the pipe and is cut short
    got: list[bytes] = []

    def read_late() -> None:
        while b"member_formed" not in b"".join(got):
            got.append(os.read(inner, 1 << 16))

    later = threading.Timer(0.3, read_late)
    later.start()
    assert deliver(to_line(MemberFormed(3)))
    later.join()
    assert ReportReader().feed(b"".join(got)) == [("member_formed", {"generation": 3})]
    os.close(inner)
    assert not deliver(to_line(MemberFormed(3)))
    os.close(outer)


def test_outside_an_elastic_job_there_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMBERSHIP_NAME, raising=False)
    assert not in_elastic_job()
    assert Member.own() is None
    monkeypatch.setenv(MEMBER_NAME, "4")
    monkeypatch.setenv(MEMBERSHIP_NAME, "0:1")  # inherited by a program further down, which has another file there
    assert not in_elastic_job()
    assert Member.own() is None


def test_a_process_its_threads_and_its_forks() -> None:
    code = """
import os, signal, sys, warnings
from paceline.member import Member, in_elastic_job
warnings.simplefilter("ignore")
assert in_elastic_job()
member = Member.own()
assert member is not None and member.id == 7 and Member.own() is member
pid = os.fork()
if not pid:
    os._exit(0 if Member.own() is None and not in_elastic_job() else 1)
assert os.waitpid(pid, 0)[1] == 0
print(member.await_generation().number)
"""
    inner, outer = os.pipe()
    os.write(outer, to_line(Generation(5, (7,), (7,), 0, False)))
    environment = {**os.environ, MEMBER_NAME: "7", MEMBERSHIP_NAME: f"{inner}:{os.fstat(inner).st_ino}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, pass_fds=[inner], capture_output=True, text=True, timeout=30
    )
    os.close(inner)
    os.close(outer)
    assert (done.stdout, done.returncode) == ("5\n", 0), done.stderr
