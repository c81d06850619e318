"""Who is alive and who waits for whom, learnt through the group's store while a rank waits.

A wait that ends within half a second costs nothing. After that the rank posts what it waits in, reads what the others
have posted, and looks whether the processes of its own host still live. What it learns is reported by name, or raised.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from torch.distributed.distributed_c10d import Store

from paceline.collectives.peers import Board, Identity, Record, StoreCall, Wait
from paceline.errors import CollectiveError, CollectiveMismatch, PeerAbsent, PeerLost

logger = logging.getLogger("paceline")

QUIET_S = 0.5  # waits shorter than this leave no trace
LOOK_EVERY_S = 0.5
ANSWER_WITHIN_S = 1.2  # a killed process closes its sockets some time before it is gone
NAMED_AT_MOST = 8

_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "got 0 bytes",
    "network is unreachable",
    "no route to host",
    "remote process exited",
    "nccl communicator was aborted",
)
_ABSENT = ("timed out", "timeout")


class Reports:
    """When a long wait is worth a line: after 3, 10, 30, 100, … seconds."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s
        self._tens = False

    def due(self, waited_s: float) -> bool:
        if waited_s < self._next_s:
            return False
        while self._next_s <= waited_s:
            self._next_s *= 3 if self._tens else 10 / 3
            self._tens = not self._tens
        return True

    def restart(self) -> None:
        self._next_s, self._tens = self._first_s, False


class StoreWatch:
    """The watch of one rank of a group that has a torch store.

    `line` names the sequence of collectives that `began` counts; it must be the same on all ranks. `store=None`
    watches without knowing anybody: waits are reported without names. `store_host` is the rank whose process answers
    for the store, if that is a rank. `settle_s` is how long all ranks must have waited for different things before
    that counts as a deadlock when it cannot be proven from what they have issued.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        line: str = "",
        report_after_s: float = 3.0,
        settle_s: float = 60.0,
        store_host: int | None = None,
        announce: bool = True,
    ) -> None:
        self._rank = rank
        self._size = size
        self._line = line
        self._settle_s = settle_s
        self._store_host = store_host
        self._what: str | None = None
        self._pid = os.getpid()
        self._store = store
        self._records: dict[int, Record] = {}
        self._asked: StoreCall[dict[int, Record]] | None = None
        self._asked_at = 0.0
        self._look_at = 0.0
        self._reports = Reports(report_after_s)
        self._differs: tuple[object, float] | None = None
        self._issued = 0
        self._recent: deque[str] = deque(maxlen=16)
        if announce:
            self.announce()

    def announce(self) -> None:
        """Post who this rank is, so that others can tell when it dies."""
        if self._board is not None:
            self._board.post()

    def began(self, call: str) -> None:
        """Note a collective that this rank has started. A deadlock can then be proven from what ranks issued."""
        self._issued += 1
        self._recent.append(call)

    def look(self, what: str, waited_s: float) -> None:
        """Report absent peers, raise for dead ones and for deadlocks. See `Watch.look`."""
        now = time.monotonic()
        self._what = what
        if waited_s < QUIET_S or now < self._look_at or os.getpid() != self._pid:
            return
        # Each look reads every record, so many ranks look less often: the store serves them all.
        self._look_at = now + LOOK_EVERY_S * max(1.0, self._size / 50)
        self._post_wait(what, waited_s)
        if (lost := self._ask(patience_s=0.05)) is not None:
            logger.warning(
                "rank %d lost the group's store and can no longer say who waits for whom: %s", self._rank, lost
            )
        self._raise_if_lost(what, waited_s)
        self._raise_if_deadlocked()
        if self._reports.due(waited_s):
            logger.warning("rank %d has waited %.1f s in %s for %s", self._rank, waited_s, what, self._missing(what))

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        """The typed error for what a transport raised. See `Watch.explain`."""
        text = str(error)
        self._what = what
        if any(sign in text.lower() for sign in _LOST):
            try:
                lost = self._find_lost(what, waited_s)
            except PeerLost as store_lost:  # the one who died took the store along
                return store_lost
            if lost:
                return self._peer_lost(what, waited_s, lost, f" ({_one_line(text)})")
            return PeerLost(
                f"a connection broke while rank {self._rank} waited {waited_s:.1f} s in {what}, and which rank died "
                f"cannot be told: {_one_line(text)}; see the logs of all ranks"
            )
        if any(sign in text.lower() for sign in _ABSENT):
            absent = self.absent()
            return PeerAbsent(
                f"rank {self._rank} waited {waited_s:.1f} s in {what} for {self._missing(what)} until the transport "
                f"itself gave up: {_one_line(text)}; see what that rank does, or give the group a longer timeout",
                ranks=absent,
            )
        return CollectiveError(f"{what} failed on rank {self._rank} after {waited_s:.1f} s: {_one_line(text)}")

    def left(self) -> None:
        """The wait is over: take back what was posted about it, if anything was."""
        self._what = None
        self._reports.restart()
        self._differs = None
        self._look_at = 0.0
        board = self._board
        if board is not None and board.own.wait is not None and os.getpid() == self._pid:
            board.own = replace(board.own, wait=None, last=board.own.wait.what)
            call = StoreCall[None](lambda _: board.post())
            call.stop()

    def absent(self) -> list[int]:
        """The ranks not known to wait for the same thing as this one."""
        self._ask(patience_s=0.5)
        if self._board is None:
            return []
        if not self._records and self._store_is_silent() and self._store_host is not None:
            return [self._store_host]
        return self._not_in(self._what)

    # Made when first needed: a checked collective makes a watch for every call, and seldom uses it.
    @cached_property
    def _me(self) -> Identity:
        return Identity.own()

    @cached_property
    def _own_board(self) -> Board:
        assert self._store is not None
        return Board(self._store, self._rank, self._size, Record(self._me))

    @property
    def _board(self) -> Board | None:
        return self._own_board if self._store is not None else None

    # What is known -------------------------------------------------------------------------------------------------

    def _post_wait(self, what: str, waited_s: float) -> None:
        board = self._board
        if board is None or (board.own.wait is not None and board.own.wait.what == what):
            return
        wait = Wait(what, time.time() - waited_s, self._line, self._issued, list(self._recent))
        board.own = replace(board.own, wait=wait, answers=False, blames=[], verdict=None)

    def _ask(self, patience_s: float) -> str | None:
        """Bring the records up to date if the store answers soon; otherwise take the answer at a later look.

        Returns why there is no store any more, if that is so since now.
        """
        if self._board is None:
            return None
        if self._asked is None:
            board = self._board
            self._asked_at = time.monotonic()
            self._asked = StoreCall(lambda _: board.exchange())
        asked = self._asked
        try:
            if not asked.wait(patience_s):
                return None
        except RuntimeError as error:
            return self._store_failed(_one_line(str(error)))
        self._asked = None
        self._records = asked.result()
        return None

    def _store_failed(self, error: str) -> str:
        self._store, self._asked = None, None
        host = self._store_host
        known = self._records.get(host) if host is not None else None
        if host is not None and host != self._rank and (known is None or not self._is_local(known) or _dies(known)):
            raise PeerLost(
                f"rank {host}{_brackets(known)}, which hosts the group's store, does not answer rank {self._rank}: "
                f"{error}; see that rank's own log for the cause",
                ranks=[host],
            )
        return error

    def _store_is_silent(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked_at > 0.4

    def _is_local(self, record: Record) -> bool:
        return record.identity.host == self._me.host

    def _dead(self) -> list[int]:
        records = self._records.items()
        return [peer for peer, record in records if self._is_local(record) and record.identity.state() == "dead"]

    def _not_in(self, what: str | None) -> list[int]:
        others = [peer for peer in range(self._size) if peer != self._rank]
        return [peer for peer in others if what is None or _what(self._records.get(peer)) != what]

    # What follows from it ------------------------------------------------------------------------------------------

    def _raise_if_lost(self, what: str, waited_s: float) -> None:
        dead = self._dead()
        if dead:
            self._ask(patience_s=0.2)  # what the dead have posted is final now
        blamed = _first_to_fail(dead, self._records, self._rank)
        if blamed:
            raise self._peer_lost(what, waited_s, blamed, "")

    def _find_lost(self, what: str, waited_s: float) -> list[int]:
        """Who broke the connection: dead on this host, or blamed by another, or silent when asked."""
        board = self._board
        if board is not None:
            self._post_wait(what, waited_s)
            board.own = replace(board.own, answers=True)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while self._board is not None and time.monotonic() < deadline:  # without a store, nothing more is learnt
            self._ask(patience_s=0.1)
            dead = self._dead()
            if dead:
                self._ask(patience_s=0.2)
            blamed = _first_to_fail(dead, self._records, self._rank)
            if blamed:
                return blamed
            time.sleep(0.02)
        if self._board is None:
            return []
        others = [peer for peer in range(self._size) if peer != self._rank]
        known = self._records
        return [r for r in others if r not in known or not (known[r].answers or self._is_local(known[r]))]

    def _peer_lost(self, what: str, waited_s: float, lost: list[int], reason: str) -> PeerLost:
        board = self._board
        if board is not None:
            # A survivor that goes down because of this must not be taken for the cause.
            board.own = replace(board.own, answers=True, blames=lost)
            StoreCall[None](lambda _: board.post()).stop()
        names = " and ".join(f"rank {peer}{_brackets(self._records.get(peer))}" for peer in lost)
        return PeerLost(
            f"{names} died while rank {self._rank} waited {waited_s:.1f} s in {what}{reason}; see the log of that "
            f"rank for the cause, then start it again or form a group without it. If it ended by itself, the ranks "
            f"had different numbers of batches: see join()",
            ranks=lost,
        )

    def _raise_if_deadlocked(self) -> None:
        board = self._board
        if board is None or board.own.wait is None:
            return
        mine = board.own.wait
        for record in self._records.values():
            if record.verdict is not None and record.verdict[1][self._rank] == mine.since:
                self._raise_verdict(*record.verdict)
        waits = {peer: record.wait for peer, record in self._records.items() if record.wait is not None}
        waits[self._rank] = mine
        proven = _disagreement(waits)
        agreed = len({wait.what for wait in waits.values()}) == 1 and not proven
        if agreed or len(waits) < self._size:
            self._differs = None
            return
        seen = [waits[peer].since for peer in range(self._size)]
        now = time.monotonic()
        if self._differs is None or self._differs[0] != seen:
            self._differs = seen, now
            return
        if now - self._differs[1] < (LOOK_EVERY_S * 2 if proven else self._settle_s):
            return
        calls = proven or {peer: f"waits in {wait.what}" for peer, wait in waits.items()}
        told = "; ".join(f"rank {peer} {calls[peer]}" for peer in sorted(calls))
        self._raise_verdict(
            f"all ranks wait for each other, and not for the same thing: {told}. Every rank must issue the same "
            f"collectives in the same order",
            seen,
        )

    def _raise_verdict(self, text: str, since: list[float]) -> None:
        board = self._board
        assert board is not None
        board.own = replace(board.own, verdict=(text, since))
        StoreCall[None](lambda _: board.post()).stop()
        raise CollectiveMismatch(text, ranks=range(self._size))

    # Words ---------------------------------------------------------------------------------------------------------

    def _missing(self, what: str) -> str:
        """Who is not there, and what each of them does instead."""
        if self._board is None:
            return "a rank that cannot be named: the group has no store to ask"
        if self._store_is_silent():
            host = self._store_host
            if host is None:
                return "the group's store, which does not answer"
            return f"rank {host}{self._state(host)}, which hosts the group's store and does not answer"
        absent = self._not_in(what)
        if not absent:
            return "no one: all ranks wait in it, so the bytes are slow or stuck on their way"
        named = [f"rank {peer}, {self._instead(peer)}" for peer in absent[:NAMED_AT_MOST]]
        if len(absent) > NAMED_AT_MOST:
            named.append(f"{len(absent) - NAMED_AT_MOST} more")
        return "; ".join(named)

    def _instead(self, peer: int) -> str:
        record = self._records.get(peer)
        if record is None:
            return "which has not announced itself to this group yet"
        if record.wait is not None:
            return f"which has waited {max(0.0, time.time() - record.wait.since):.1f} s in {record.wait.what}"
        last = f"; last wait: {record.last}" if record.last else ""
        return f"which is in no collective{self._state(peer, last)}"

    def _state(self, peer: int, more: str = "") -> str:
        record = self._records.get(peer)
        if record is None:
            return ""
        if self._is_local(record):
            return f" ({record.identity.state()}, pid {record.identity.pid}{more})"
        return f" ({record.identity}{more})"


def _what(record: Record | None) -> str | None:
    return record.wait.what if record is not None and record.wait is not None else None


def _brackets(record: Record | None) -> str:
    return f" ({record.identity})" if record is not None else ""


def _dies(record: Record) -> bool:
    """Whether a process of this host is dead, or dies in the next second: its sockets close first."""
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while record.identity.state() != "dead":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _first_to_fail(dead: list[int], records: Mapping[int, Record], rank: int) -> list[int]:
    """The dead that blamed nobody before they died; else whoever is blamed by others."""
    first = [peer for peer in dead if not records[peer].blames]
    blamed = {peer for record in records.values() for peer in record.blames if peer != rank}
    return first or sorted(blamed) or dead


def _disagreement(waits: Mapping[int, Wait]) -> dict[int, str]:
    """What each rank issued at the first place where their sequences differ; empty if none is seen to differ."""
    if len({wait.line for wait in waits.values()}) > 1:
        return {}
    first = max(wait.issued - len(wait.recent) for wait in waits.values())
    last = min(wait.issued for wait in waits.values())
    for number in range(first, last):
        calls = {peer: wait.recent[number - wait.issued] for peer, wait in waits.items()}
        if len(set(calls.values())) > 1:
            return {
                peer: f"issued {call} as collective {number + 1}, and waits in {waits[peer].what}"
                for peer, call in calls.items()
            }
    return {}


def _one_line(text: str) -> str:
    return " ".join(text.split())
