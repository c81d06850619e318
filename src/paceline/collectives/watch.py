"""Which ranks are alive and which wait for which, exchanged through the group's store while a rank waits.

A wait that ends within half a second costs nothing. After that the rank posts its wait, reads what the others
have posted, and checks whether the processes of its own host are still alive. The findings are reported by name, or
raised.
"""

import logging
import os
import time
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.collectives.call_site import call_site, describe_site
from paceline.collectives.deadlock import DeadlockDetector
from paceline.collectives.failure_notice import failures_posted_at_exit
from paceline.collectives.peers import OwnState, PeerBoard, PeerRecord, Wait
from paceline.collectives.store_call import StoreCall, calls_joined_at_exit
from paceline.errors import CollectiveError, CollectiveMismatch, PeerAbsent, PeerLost
from paceline.member import Member

logger = logging.getLogger("paceline")

QUIET_S = 0.5  # waits shorter than this leave no trace
LOOK_EVERY_S = 0.5
ANSWER_WITHIN_S = 1.2  # a killed process closes its sockets some time before it exits
WORD_S = 0.5  # a launcher learns of a death when connections to the dead break, and of a rank that leaves, soon after
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

    def __init__(self) -> None:
        self._next_s, self._tens = 3.0, False

    def due(self, waited_s: float) -> bool:
        if waited_s < self._next_s:
            return False
        while self._next_s <= waited_s:
            self._next_s *= 3 if self._tens else 10 / 3
            self._tens = not self._tens
        return True

    def restart(self) -> None:
        self._next_s, self._tens = 3.0, False


class StoreWatch:
    """The watch of one rank of a group that has a torch store.

    `sequence` names the sequence of collectives that `calls` counts; it must be the same on all ranks. `store=None`
    watches without knowing other ranks: waits are reported without names. `store_host` is the rank whose process
    answers for the store, if that is a rank. `settle_s` is how long all ranks must have waited for different things
    before that counts as a deadlock when it cannot be proven from what they have issued: see `collectives.deadlock`.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        sequence: str = "",
        settle_s: float = 60.0,
        store_host: int | None = None,
    ) -> None:
        self._rank = rank
        self._sequence = sequence
        self._store_host = store_host
        self.brief = False  # whether each wait has its own short timeout
        self._what: str | None = None
        self._pid = os.getpid()
        self._size = size
        self._others = [peer for peer in range(size) if peer != rank]
        self._board = None if store is None else PeerBoard(store, rank, size)
        self._own = OwnState() if self._board is None else self._board.own
        # Where collectives that this rank starts are noted. A deadlock can then be proven from them.
        self.calls = self._own.calls(sequence)
        self._records: dict[int, PeerRecord] = {}
        self._asked: StoreCall[dict[int, PeerRecord]] | None = None
        self._asked_at = 0.0
        self._look_at = 0.0
        self._reports = Reports()
        self._deadlock = DeadlockDetector(size, settle_s)
        # In an elastic job the launcher reports at once which members have left the generation of this group.
        self._member = Member.own()
        newest = None if self._member is None else self._member.generation
        self._generation = None if newest is None else newest.number
        calls_joined_at_exit()
        failures_posted_at_exit()
        self._own.size, self._own.hosts_store = size, self._own.hosts_store or store_host == rank
        if self._own.posted is None:
            self._post_soon()  # this rank's identity, so that others can detect its death

    def look(self, what: str, waited_s: float) -> None:
        """Report absent peers, raise for dead ones and for deadlocks. See `Watch.look`."""
        now = time.monotonic()
        self._what = what
        if (left := self._left_generation(what, waited_s)) is not None:
            raise left
        if waited_s < QUIET_S or now < self._look_at or os.getpid() != self._pid:
            return
        # Each look reads every record, so many ranks look less often: the store serves them all.
        self._look_at = now + LOOK_EVERY_S * max(1.0, self._size / 50)
        self._note_wait(what, waited_s)
        if (why := self._ask(patience_s=0.05)) is not None:
            logger.warning(
                "rank %d lost the group's store and can no longer tell which rank waits for which: %s", self._rank, why
            )
        if lost := self._first_to_fail():
            raise self._peer_lost(what, waited_s, lost)
        self._raise_if_deadlocked()
        if self._reports.due(waited_s):
            about = f"rank {self._rank} has waited {waited_s:.1f} s in {what} for {self._missing(what)}"
            logger.warning("%s%s", about, f"; rank {self._rank} waits{at}" if (at := self._at()) else "")

    def look_for_lost(self, what: str, waited_s: float) -> None:
        """Raise for dead peers, and nothing else: this rank itself may be the one that is late."""
        if (left := self._left_generation(what, waited_s)) is not None:
            raise left
        now = time.monotonic()
        if waited_s < QUIET_S or now < self._look_at or os.getpid() != self._pid:
            return
        self._look_at = now + LOOK_EVERY_S * max(1.0, self._size / 50)
        self._ask(patience_s=0.05)
        if lost := self._first_to_fail():
            raise self._peer_lost(what, waited_s, lost)

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        """The typed error for an error of a transport. See `Watch.explain`."""
        text = str(error)
        self._what = what
        if (left := self._left_generation(what, waited_s, patience_s=WORD_S)) is not None:
            return left
        if any(sign in text.lower() for sign in _LOST):
            try:
                lost = self._find_lost(what, waited_s)
            except PeerLost as store_lost:  # the dead rank ran the store
                return store_lost
            if (verdict := self._verdict()) is not None:  # the first to raise it has left, and closed connections
                return CollectiveMismatch(verdict[0], ranks=range(self._size))
            if lost:
                return self._peer_lost(what, waited_s, lost, f" ({_one_line(text)})")
            where = f"a connection broke while rank {self._rank} waited {waited_s:.1f} s in {what}"
            if not (silent := self._silent()):
                unknown = f"{where}, and it is not known which rank died: {_one_line(text)}; see the logs of all ranks"
                return PeerLost(unknown)
            closed = " or ".join(f"rank {peer}{_brackets(self._records.get(peer))}" for peer in silent)
            return PeerLost(
                f"{where}: no rank has died, so {closed} has closed it, perhaps after an error ({_one_line(text)}); "
                f"see the log of that rank",
                ranks=silent,
            )
        if any(sign in text.lower() for sign in _ABSENT):
            absent = self.absent()
            return PeerAbsent(
                f"rank {self._rank} waited {waited_s:.1f} s in {what} for {self._missing(what)} until the transport "
                f"timed out: {_one_line(text)}; check what that rank is doing, or give the group a longer timeout",
                ranks=absent,
            )
        return CollectiveError(f"{what} failed on rank {self._rank} after {waited_s:.1f} s: {_one_line(text)}")

    def left(self) -> None:
        """The wait is over: remove its post, if there is one."""
        self._what = None
        self._reports.restart()
        self._deadlock.forget()
        self._look_at = 0.0
        if os.getpid() == self._pid and self._own.left():
            self._post_soon()

    def absent(self) -> list[int]:
        """The ranks not known to wait for the same thing as this one."""
        self._ask(patience_s=0.5)
        if self._board is None:
            return []
        if not self._records and self._store_is_silent() and self._store_host is not None:
            return [self._store_host]
        return self._not_in(self._what)

    def _at(self) -> str:
        """The line of the script that waits, as text. Waits that get this far last long enough to afford it."""
        return describe_site(call_site())

    # State --------------------------------------------------------------------------------------------------------

    def _note_wait(self, what: str, waited_s: float) -> None:
        self._own.waits(Wait(what, time.time() - waited_s, self._sequence, self._at(), self.brief))

    def _post_soon(self, **fields: Any) -> None:
        self._own.say(**fields)
        if self._board is not None:
            self._board.post_soon()

    def _ask(self, patience_s: float) -> str | None:
        """Bring the records up to date if the store answers soon; otherwise use the answer at a later look.

        Returns why the store has ended, if that was just noticed.
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
        self._board, self._asked = None, None
        host = self._store_host
        known = self._records.get(host) if host is not None else None
        if host is not None and host != self._rank and (known is None or not self._is_local(known) or _dies(known)):
            raise PeerLost(
                f"rank {host}{_brackets(known)}, which hosts the group's store, does not answer rank {self._rank}: "
                f"{error}; see the log of that rank for the cause",
                ranks=[host],
            )
        return error

    def _store_is_silent(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked_at > 0.4

    def _is_local(self, record: PeerRecord) -> bool:
        return record.identity.host == self._own.identity.host

    def _is_dead(self, record: PeerRecord) -> bool:
        return self._is_local(record) and record.identity.state() == "dead"

    def _has_left(self, record: PeerRecord) -> bool:
        """Whether a rank left the group before it reached what this one waits for."""
        wait = self._own.waiting
        return record.ended and wait is not None and record.issued(wait.sequence) < self._own.calls(wait.sequence).count

    def _not_in(self, what: str | None) -> list[int]:
        return [peer for peer in self._others if what not in _whats(self._records.get(peer))]

    # Conclusions ---------------------------------------------------------------------------------------------------

    def _first_to_fail(self) -> list[int]:
        """The dead ranks that blamed no other before they died; else those blamed by others."""
        dead = [
            peer
            for peer, record in self._records.items()
            if record.failed or self._has_left(record) or self._is_dead(record)
        ]
        if dead:
            self._ask(patience_s=0.2)  # the posts of dead ranks are final now
        first = [peer for peer in dead if not self._records[peer].blames]
        blamed = {peer for record in self._records.values() for peer in record.blames if peer != self._rank}
        return first or sorted(blamed) or dead

    def _find_lost(self, what: str, waited_s: float) -> list[int]:
        """The ranks that broke the connection: dead on this host, blamed by another, or silent."""
        self._note_wait(what, waited_s)
        self._own.say(answers=True)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while self._board is not None and time.monotonic() < deadline:  # without a store, nothing more is learned
            self._ask(patience_s=0.1)
            if lost := self._first_to_fail():
                return lost
            time.sleep(0.02)
        if self._board is None:
            return []
        known = self._records
        return [r for r in self._others if r not in known or not (known[r].answers or self._is_local(known[r]))]

    def _left_generation(self, what: str, waited_s: float, patience_s: float = 0.0) -> PeerLost | None:
        """The error that names the members that have left this generation of an elastic job, if the launcher reports it
        in time."""
        if self._member is None or self._generation is None:
            return None
        until = time.monotonic() + patience_s
        while not (left := self._member.ended(self._generation)):
            if time.monotonic() >= until:
                return None
            time.sleep(0.002)
        newest = self._member.generation
        members = () if newest is None or newest.number != self._generation else newest.members
        ranks = [members.index(one.member) for one in left if one.member in members]
        who = "; ".join(f"member {one.member} {one.reason}" for one in left)
        return PeerLost(
            f"generation {self._generation} is over while rank {self._rank} waited {waited_s:.1f} s in {what}: {who}",
            ranks=ranks,
        )

    def _silent(self) -> list[int]:
        """The living ranks that have not answered: a rank that has lost a connection too has answered."""
        return [] if self._board is None else [peer for peer, record in self._records.items() if not record.answers]

    def _peer_lost(self, what: str, waited_s: float, lost: list[int], reason: str = "") -> PeerLost:
        # A survivor that fails because of this must not be mistaken for the cause.
        self._post_soon(answers=True, blames=lost)
        names = " and ".join(f"rank {peer}{_brackets(self._records.get(peer))}" for peer in lost)
        known = [self._records.get(peer) for peer in lost]  # a rank without a record may be blamed, or missing
        how = "left the group" if all(record is not None and record.ended for record in known) else "died"
        error = PeerLost(
            f"{names} {how} while rank {self._rank} waited {waited_s:.1f} s in {what}{self._at()}{reason}; see the log "
            f"of that rank for the cause, then start it again or form a group without it. If it exited normally, "
            f"the ranks probably had different numbers of batches: see join()",
            ranks=lost,
        )
        for peer, record in zip(lost, known, strict=True):
            if record is not None and record.failed:
                error.add_note(f"What ended rank {peer}:\n{record.failed}")
        return error

    def _raise_if_deadlocked(self) -> None:
        verdict = self._verdict()
        if verdict is None:
            records = {**self._records, self._rank: self._own.record()}
            found = self._deadlock.check(records)
            if found is None:
                return
            verdict = found, [[wait.since for wait in records[peer].waits] for peer in range(self._size)]
        self._post_soon(verdict=verdict)
        raise CollectiveMismatch(verdict[0], ranks=range(self._size))

    def _verdict(self) -> tuple[str, list[list[float]]] | None:
        """A deadlock that another rank has detected and that includes this wait."""
        mine = self._own.waiting
        verdicts = [record.verdict for record in self._records.values() if record.verdict is not None]
        return next((one for one in verdicts if mine is not None and mine.since in one[1][self._rank]), None)

    # Text ---------------------------------------------------------------------------------------------------------

    def _missing(self, what: str) -> str:
        """The missing ranks, and what each of them is doing instead."""
        if self._board is None:
            return "a rank that cannot be named: the group has no store to ask"
        if self._store_is_silent():
            host = self._store_host
            if host is None:
                return "the group's store, which does not answer"
            return f"rank {host}{self._state(host)}, which hosts the group's store and does not answer"
        absent = self._not_in(what)
        if not absent:
            return "no rank: all ranks have entered it; the transfer itself is stalled"
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


def _whats(record: PeerRecord | None) -> list[str]:
    return [wait.what for wait in record.waits] if record is not None else []


def _brackets(record: PeerRecord | None) -> str:
    return f" ({record.identity})" if record is not None else ""


def _dies(record: PeerRecord) -> bool:
    """Whether a process of this host is dead, or dies in the next second: its sockets close first."""
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while record.identity.state() != "dead":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
