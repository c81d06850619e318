"""Who is alive and who waits for whom, learnt through the group's store while a rank waits.

A wait that ends within half a second costs nothing. After that the rank posts what it waits in, reads what the others
have posted, and looks whether the processes of its own host still live. What it learns is reported by name, or raised.
"""

import logging
import os
import time
from collections.abc import Mapping
from functools import cached_property

from torch.distributed.distributed_c10d import Store

from paceline.collectives.call_log import CallLog
from paceline.collectives.call_site import call_site, told
from paceline.collectives.deadlock import Doubt
from paceline.collectives.ending import settled_at_exit
from paceline.collectives.peers import Board, Identity, OwnState, Record, StoreCall, Wait, own_state
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

    `line` names the sequence of collectives that `calls` counts; it must be the same on all ranks. `store=None`
    watches without knowing anybody: waits are reported without names. `store_host` is the rank whose process answers
    for the store, if that is a rank. `settle_s` is how long all ranks must have waited for different things before
    that counts as a deadlock when it cannot be proven from what they have issued: see `collectives.deadlock`.
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
        self._store_host = store_host
        self.brief = False  # whether a timeout of its own ends each wait soon
        self._what: str | None = None
        self._pid = os.getpid()
        self._store = store
        self._records: dict[int, Record] = {}
        self._asked: StoreCall[dict[int, Record]] | None = None
        self._asked_at = 0.0
        self._look_at = 0.0
        self._reports = Reports(report_after_s)
        self._doubt = Doubt(size, settle_s)
        settled_at_exit()
        if announce:
            self.announce()

    def announce(self) -> None:
        """Post who this rank is, so that others can tell when it dies."""
        if self._board is not None:
            self._board.post()

    @cached_property
    def calls(self) -> CallLog:
        """Where collectives that this rank starts are noted. A deadlock can then be proven from what ranks issued."""
        return CallLog(set()) if self._store is None else self._own.calls(self._line)

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
            about = f"rank {self._rank} has waited {waited_s:.1f} s in {what} for {self._missing(what)}"
            logger.warning("%s%s", about, f"; rank {self._rank} waits{at}" if (at := self._at()) else "")

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        """The typed error for what a transport raised. See `Watch.explain`."""
        text = str(error)
        self._what = what
        if any(sign in text.lower() for sign in _LOST):
            try:
                lost = self._find_lost(what, waited_s)
            except PeerLost as store_lost:  # the one who died took the store along
                return store_lost
            if (verdict := self._verdict()) is not None:  # whoever raised it first has left, and closed connections
                return CollectiveMismatch(verdict[0], ranks=range(self._size))
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
        self._doubt.forget()
        self._look_at = 0.0
        board = self._board
        if board is not None and os.getpid() == self._pid and board.own.left():
            StoreCall[None](lambda _: board.post()).stop()

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
        return Board(self._store, self._rank, self._size)

    @cached_property
    def _own(self) -> OwnState:
        assert self._store is not None
        return own_state(self._store, self._rank)

    @property
    def _board(self) -> Board | None:
        return self._own_board if self._store is not None else None

    def _at(self) -> str:
        """The line of the script that waits, as text. Waits that come so far last long enough to afford it."""
        return told(call_site())

    # What is known -------------------------------------------------------------------------------------------------

    def _post_wait(self, what: str, waited_s: float) -> None:
        if self._board is not None:
            self._board.own.waits(Wait(what, time.time() - waited_s, self._line, self._at(), self.brief))

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
        return [peer for peer, record in self._records.items() if self._has_left(record) or self._is_dead(record)]

    def _is_dead(self, record: Record) -> bool:
        return self._is_local(record) and record.identity.state() == "dead"

    def _has_left(self, record: Record) -> bool:
        """Whether a rank left the group before it came to what this one waits for."""
        board = self._board
        wait = None if board is None else board.own.waiting
        if not record.ended or board is None or wait is None:
            return False
        return record.issued(wait.line) < board.own.record().issued(wait.line)

    def _not_in(self, what: str | None) -> list[int]:
        others = [peer for peer in range(self._size) if peer != self._rank]
        return [peer for peer in others if what not in _whats(self._records.get(peer))]

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
            board.own.say(answers=True)
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
            board.own.say(answers=True, blames=lost)
            StoreCall[None](lambda _: board.post()).stop()
        names = " and ".join(f"rank {peer}{_brackets(self._records.get(peer))}" for peer in lost)
        how = "left the group" if all(self._records[peer].ended for peer in lost) else "died"
        return PeerLost(
            f"{names} {how} while rank {self._rank} waited {waited_s:.1f} s in {what}{self._at()}{reason}; see the log "
            f"of that rank for the cause, then start it again or form a group without it. If it ended by itself, the "
            f"ranks had different numbers of batches: see join()",
            ranks=lost,
        )

    def _raise_if_deadlocked(self) -> None:
        board = self._board
        mine = None if board is None else board.own.waiting
        if board is None or mine is None:
            return
        if (verdict := self._verdict()) is not None:
            self._raise_verdict(*verdict)
        records = {**self._records, self._rank: board.own.record()}
        found = self._doubt.look(records)
        if found is not None:
            self._raise_verdict(found, [[wait.since for wait in records[peer].waits] for peer in range(self._size)])

    def _verdict(self) -> tuple[str, list[list[float]]] | None:
        """A deadlock that another rank has seen and that this wait is part of."""
        mine = None if self._board is None else self._board.own.waiting
        verdicts = [record.verdict for record in self._records.values() if record.verdict is not None]
        return next((one for one in verdicts if mine is not None and mine.since in one[1][self._rank]), None)

    def _raise_verdict(self, text: str, since: list[list[float]]) -> None:
        board = self._board
        assert board is not None
        board.own.say(verdict=(text, since))
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
        if record.waits:
            now = time.time()
            return "which has waited " + " and ".join(
                f"{max(0.0, now - wait.since):.1f} s in {wait}" for wait in record.waits
            )
        last = f"; last wait: {record.last}" if record.last else ""
        return f"which is in no collective{self._state(peer, last)}"

    def _state(self, peer: int, more: str = "") -> str:
        record = self._records.get(peer)
        if record is None:
            return ""
        if self._is_local(record):
            return f" ({record.identity.state()}, pid {record.identity.pid}{more})"
        return f" ({record.identity}{more})"


def _whats(record: Record | None) -> list[str]:
    return [wait.what for wait in record.waits] if record is not None else []


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


def _one_line(text: str) -> str:
    return " ".join(text.split())
