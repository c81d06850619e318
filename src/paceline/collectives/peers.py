"""The records that ranks post about themselves, one per rank, on the group's store."""

import _thread
import json
import os
import socket
import sys
import threading
import weakref
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.collectives.group import CallLog
from paceline.collectives.store_call import StoreCall
from paceline.errors import Malformed, MessageDamaged
from paceline.rank_report import STORE_HOST_NAME
from paceline.typed_json import read_json

# The advice about a value on a group's store that none of its ranks has written.
FOREIGN = "another program may write to the store of this group: check which processes can connect to this machine"


@dataclass(frozen=True)
class Identity:
    """One process, so that another process on the same host can check whether it is still alive."""

    host: str  # equal on two ranks exactly if they share a process id namespace
    hostname: str
    pid: int
    started: str  # kernel ticks since boot: a process id alone may be reused soon
    address: str = ""  # of its machine, where the launcher has placed ranks on several

    @classmethod
    def own(cls) -> "Identity":
        hostname, pid = socket.gethostname(), os.getpid()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        address = os.environ.get(STORE_HOST_NAME, "")
        return cls(f"{boot} {hostname} {namespace}", hostname, pid, _stat(pid)[1], address)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "Identity":
        """The reverse of `encode`. Raises Malformed for anything else."""
        return read_json(cls, text, "a process")

    def state(self) -> str:
        """The state of a process on this host: "alive", "stopped" or "dead"."""
        letter, started = _stat(self.pid)
        if letter in ("", "Z", "X") or started != self.started:
            return "dead"
        return "stopped" if letter in ("T", "t") else "alive"

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.hostname}"


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; the letter is empty if there is no such process."""
    try:
        # The command comes second, in brackets, and may itself contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]


@dataclass(frozen=True)
class Wait:
    """A wait of a thread of a rank."""

    what: str
    since: float  # wall clock
    sequence: str = ""  # of collectives; the wait belongs to it
    at: str = ""  # the call site, as text
    brief: bool = False  # a timeout of its own ends it soon

    def __str__(self) -> str:
        return f"{self.what}{self.at}"


@dataclass(frozen=True)
class Issued:
    """The collectives that a rank has started in one sequence: how many, and the newest as text."""

    count: int = 0
    recent: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PeerRecord:
    """The record that a rank posts about itself."""

    identity: Identity
    waits: list[Wait] = field(default_factory=list)  # one per thread that waits
    free: int = 0  # other threads that start collectives of this group, and are not waiting
    sequences: dict[str, Issued] = field(default_factory=dict)
    looks: int = 0  # grows while the rank waits: the record is no older than the newest look
    last: str = ""
    answers: bool = False  # it has noticed a failure, and is alive
    blames: list[int] = field(default_factory=list)
    ended: bool = False  # it has left the group, and will start nothing in it any more
    failed: str = ""  # the end of the traceback that ends it
    # A deadlock this rank has seen: the text, and since when the threads of each rank had waited. Threads that still
    # wait since then raise it too, even if they look only after the first has left.
    verdict: tuple[str, list[list[float]]] | None = None

    def issued(self, sequence: str) -> int:
        return self.sequences[sequence].count if sequence in self.sequences else 0

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes, rank: int) -> "PeerRecord":
        """The record that a rank has posted. Raises MessageDamaged if it is malformed."""
        try:
            return read_json(cls, text, f"the record of rank {rank}")
        except Malformed as error:
            raise MessageDamaged(f"{error}; {FOREIGN}", ranks=[rank]) from error


class OwnState:
    """The state of this process in one group. All watches over the group share it, on all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.posting = threading.Lock()
        self.posted: PeerRecord | None = None
        self.size = 0
        self.hosts_store = False
        self.pid = os.getpid()
        self._threads: set[int] = set()
        self._waits: dict[int, Wait] = {}
        self._sequences: dict[str, CallLog] = {}
        self._said: dict[str, Any] = {}
        self._looks = 0

    def calls(self, sequence: str) -> CallLog:
        """The collectives that this process starts in one sequence of the group."""
        return self._sequences.setdefault(sequence, CallLog(self._threads))

    def waits(self, wait: Wait) -> None:
        """This thread waits. `since` does not change while the wait is the same."""
        me = _thread.get_ident()
        with self.lock:
            self._threads.add(me)
            self._looks += 1
            known = self._waits.get(me)
            if known is None or (known.what, known.sequence) != (wait.what, wait.sequence):
                self._waits[me] = wait
                self._said.update(answers=False, blames=[], verdict=None)

    def left(self) -> bool:
        """This thread no longer waits. Returns whether its wait was recorded."""
        with self.lock:
            wait = self._waits.pop(_thread.get_ident(), None)
            if wait is not None:
                self._said["last"] = wait.what
            return wait is not None

    @property
    def waiting(self) -> Wait | None:
        """The current wait of this thread."""
        return self._waits.get(_thread.get_ident())

    def say(self, **fields: Any) -> None:
        with self.lock:
            self._said.update(fields)

    def record(self) -> PeerRecord:
        # A thread that runs no Python, such as an idle one of autograd's, starts nothing on its own. Only the numbers
        # are kept: frames would keep the threads' objects alive.
        alive = set(sys._current_frames())
        with self.lock:
            self._threads &= alive
            free = len(self._threads - self._waits.keys())
            sequences = {name: Issued(log.count, log.recent()) for name, log in list(self._sequences.items())}
            return PeerRecord(self.identity, list(self._waits.values()), free, sequences, self._looks, **self._said)

    @cached_property
    def identity(self) -> Identity:
        return Identity.own()


# One per group and process, as torch keeps one table of groups; unit tests have several ranks in one process.
_own: "weakref.WeakKeyDictionary[Store, dict[int, OwnState]]" = weakref.WeakKeyDictionary()


def own_state(store: Store, rank: int) -> OwnState:
    """The state of this process as `rank` of the group with this store."""
    ranks = _own.setdefault(store, {})
    state = ranks.get(rank)
    if state is None or state.pid != os.getpid():
        state = ranks[rank] = OwnState()
    return state


def own_states() -> list[tuple[Store, int, OwnState]]:
    """All groups of this process: their stores, its rank there, and its state."""
    pid = os.getpid()
    return [(store, rank, own) for store, ranks in _own.items() for rank, own in ranks.items() if own.pid == pid]


class PeerBoard:
    """The records of all ranks. Its calls may block for as long as the store does: make them through `StoreCall`."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._others = [peer for peer in range(size) if peer != rank]
        self._seen: set[int] = set()
        self.own = own_state(store, rank)

    def post(self) -> None:
        own = self.own
        with own.posting:  # the newest record is the last to arrive
            record = own.record()
            if record != own.posted:
                self._store.set(self._key(self._rank), record.encode())
                own.posted = record

    def post_soon(self) -> None:
        """Post without waiting for a store that does not answer."""
        StoreCall[None](lambda _: self.post()).stop()

    def exchange(self) -> dict[int, PeerRecord]:
        """Post the own record if it changed, and read those of the peers that have one."""
        self.post()
        with self._lock:
            # `multi_get` would block on a key that is not there yet; once there, a record is never removed.
            unseen = [peer for peer in self._others if peer not in self._seen]
            if unseen and self._store.check([self._key(peer) for peer in unseen]):
                self._seen.update(unseen)
            else:
                self._seen.update(peer for peer in unseen if self._store.check([self._key(peer)]))
            seen = sorted(self._seen)
            found = self._store.multi_get([self._key(peer) for peer in seen]) if seen else []
            return {peer: PeerRecord.decode(text, peer) for peer, text in zip(seen, found, strict=True)}

    def _key(self, rank: int) -> str:
        return f"paceline/rank/{rank}"


def post_end(store: Store, rank: int, size: int) -> None:
    """Post that this rank leaves the group, so that no rank waits for it forever."""
    board = PeerBoard(store, rank, size)
    board.own.say(ended=True)
    board.post()
