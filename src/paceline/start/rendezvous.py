"""How the ranks of a world find each other before there is a process group.

Every rank announces itself in a store at rank 0, and rank 0 makes one decision for all: "go", or which ranks are
missing. Every wait is bounded, and in short slices, so Ctrl-C ends it.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store, TCPStore

from paceline.collectives.store_call import StoreCall
from paceline.errors import Malformed, WorldError, WorldNotFormed
from paceline.start.bound_store import host_store
from paceline.typed_json import read_json
from paceline.world import World

T = TypeVar("T")

SLICE_S = 0.05
# How long one handshake with a store may take before it is tried again, and how long a refusing rank 0 keeps its store
# open so that the others can read why.
HANDSHAKE_S = 5.0
READ_S = 2.0
# Ranks start at different times: a rank accepts the decision of rank 0 this long after its own timeout.
GRACE_S = 1.0
# torch's timeout for the store of a group that it forms itself.
STORE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class _Decision:
    """The world forms if no rank is missing and all report the same size."""

    missing: list[int]
    sizes: list[tuple[int, int]]  # as reported: (rank, size of the world)


def rendezvous(world: World, timeout_s: float) -> Store:
    """Wait until all ranks are there; return the store through which they may form a group."""
    if world.size == 1:
        return HashStore()
    if not world.master_addr or not world.master_port:
        missing = "MASTER_PORT" if world.master_addr else "MASTER_ADDR"
        raise WorldError(
            f"rank {world.rank} of {world.size} does not know where to find rank 0: expected {missing}, got none "
            f"(world read from: {world.source}); set it to the host and a free port of rank 0, the same on all ranks"
        )
    try:
        return _rendezvous_in_store(world, time.monotonic() + timeout_s, timeout_s)
    except (WorldError, KeyboardInterrupt) as error:
        # The frames below hold the store, and with it an open port, for as long as the traceback is kept.
        raise error.with_traceback(None) from error.__cause__


def _rendezvous_in_store(world: World, deadline: float, timeout_s: float) -> Store:
    while True:
        store = _open_store(world, deadline, timeout_s)
        try:
            agreed = _Rendezvous(store, world, timeout_s).wait(deadline)
        except DistNetworkError:
            # The store was that of an earlier world at the same address, and has ended. The next one will follow.
            if world.rank == 0 or time.monotonic() > deadline:
                raise
            continue
        store.set_timeout(STORE_TIMEOUT)
        return agreed


def _open_store(world: World, deadline: float, timeout_s: float) -> TCPStore:
    # Under torchrun the agent of the first machine holds the store, and rank 0 is a client like the others.
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = _numeric_if_loopback(world.master_addr)
    handshake = timedelta(seconds=max(0.1, min(HANDSHAKE_S, deadline - time.monotonic())))
    if world.rank == 0 and not agent_has_store:
        return _host_store(address, world.master_port, handshake)
    while True:
        _reach(world, address, deadline, timeout_s)
        # On a thread: the constructor blocks and ignores Ctrl-C if a listener does not answer.
        opening = StoreCall(lambda _: TCPStore(address, world.master_port, timeout=handshake, wait_for_workers=False))
        try:
            while not opening.wait(SLICE_S):
                if time.monotonic() > deadline + GRACE_S:
                    raise _unreachable(world, timeout_s, "a process listens there but does not answer like a store")
            return opening.result()
        except DistNetworkError as error:
            if time.monotonic() > deadline:
                raise _unreachable(world, timeout_s, str(error)) from error


def _host_store(address: str, port: int, handshake: timedelta) -> TCPStore:
    try:
        return host_store(address, port, handshake)
    except (OSError, DistNetworkError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorldError(
            f"rank 0 cannot listen at {address}:{port}: {reason}; expected a free port in MASTER_PORT "
            f"(another job may hold this one)"
        ) from error


def _reach(world: World, address: str, deadline: float, timeout_s: float) -> None:
    """Wait until something listens where rank 0 should be. A plain socket can be interrupted and logs nothing."""
    while True:
        try:
            socket.create_connection((address, world.master_port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(world, timeout_s, error.strerror or str(error)) from error
            time.sleep(SLICE_S)
        else:
            return


def _unreachable(world: World, timeout_s: float, reason: str) -> WorldNotFormed:
    return WorldNotFormed(
        f"rank {world.rank} of {world.size}: rank 0 could not be reached at {world.master_addr}:{world.master_port} "
        f"within {timeout_s:g} s: {reason}; check that rank 0 is running, and that MASTER_ADDR and MASTER_PORT are its "
        f"own (world read from: {world.source})",
        missing=(0,),
    )


def _numeric_if_loopback(address: str) -> str:
    # Both sides must use the same one of the several addresses that "localhost" may resolve to.
    return "127.0.0.1" if address.lower() == "localhost" else address


class _Rendezvous:
    """One rank's part in one rendezvous in an open store."""

    def __init__(self, store: Store, world: World, timeout_s: float) -> None:
        self._world = world
        self._timeout_s = timeout_s
        # A torchrun agent keeps its store over restarts of the ranks, and one process may form several worlds in turn:
        # neither may read entries of an earlier rendezvous.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._base = PrefixStore(f"paceline/{attempt}", store)
        self._claim_rank()
        self._round = self._base.add(f"round/{world.rank}", 1)
        self._store = PrefixStore(f"round-{self._round}", self._base)
        self._store.set(self._rank_key(world.rank), str(world.size))

    def wait(self, deadline: float) -> Store:
        try:
            while not self._store.check(["decision"]):
                if self._world.rank == 0:
                    self._decide(deadline)
                else:
                    self._follow(deadline)
                time.sleep(SLICE_S)
            self._apply(self._read("decision", _Decision))
        except DistNetworkError:
            raise  # the store has ended, and the announcement with it
        except BaseException:
            self._withdraw()
            raise
        return PrefixStore("group", self._store)

    def _claim_rank(self) -> None:
        rank, own = self._world.rank, f"{socket.gethostname()}, process {os.getpid()}"
        holder = self._base.compare_set(f"holder/{rank}", "", own).decode(errors="replace")
        if holder != own:
            raise WorldError(
                f"two processes claim to be rank {rank} of {self._world.size}: {own} and {holder}; "
                f"expected one process per rank (world read from: {self._world.source})"
            )

    def _decide(self, deadline: float) -> None:
        """Rank 0 decides, so that the rendezvous ends in the same way for all ranks."""
        keys = [self._rank_key(rank) for rank in range(self._world.size)]
        if self._store.check(keys):
            self._publish(_Decision([], [(rank, self._read(key, int)) for rank, key in enumerate(keys)]))
        elif time.monotonic() > deadline and (missing := self._missing()):
            self._publish(_Decision(missing, []))

    def _follow(self, deadline: float) -> None:
        """The others wait for the decision, and decide themselves only if rank 0 would wait for ranks that cannot
        exist."""
        rank_0_is_there = self._store.check([self._rank_key(0)])
        size = self._read(self._rank_key(0), int) if rank_0_is_there else self._world.size
        if size != self._world.size:
            self._publish(_Decision([], [(0, size), (self._world.rank, self._world.size)]))
        elif time.monotonic() > deadline + (GRACE_S if rank_0_is_there else 0.0):
            raise self._not_formed(self._missing())

    def _publish(self, decision: _Decision) -> None:
        self._store.compare_set("decision", "", json.dumps(asdict(decision)))

    def _read(self, key: str, kind: type[T]) -> T:
        """The value that a rank has written under a key."""
        try:
            return read_json(kind, self._store.get(key), f"the value of a rank of this world under {key!r}")
        except Malformed as error:
            raise WorldError(
                f"{error}; another program writes to the store of this world at {self._world.master_addr}:"
                f"{self._world.master_port}: check which other processes can connect there"
            ) from error

    def _apply(self, decision: _Decision) -> None:
        world = self._world
        others = [(rank, size) for rank, size in decision.sizes if size != world.size]
        if decision.missing:
            failure: WorldError = self._not_formed(decision.missing)
        elif others:
            failure = WorldError(
                f"ranks disagree about the size of the world: rank {world.rank} says {world.size} and rank "
                f"{others[0][0]} says {others[0][1]}; expected the same WORLD_SIZE on all ranks"
            )
        else:
            return
        self._let_others_read()
        raise failure

    def _let_others_read(self) -> None:
        """The store ends with rank 0, which waits briefly for ranks that have not read the decision yet."""
        present = self._world.size - len(self._missing())
        read = self._store.add("read", 1)
        until = time.monotonic() + READ_S
        while self._world.rank == 0 and read < present and time.monotonic() < until:
            time.sleep(SLICE_S)
            read = self._store.add("read", 0)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if not self._store.check([self._rank_key(rank)])]

    def _not_formed(self, missing: list[int]) -> WorldNotFormed:
        world = self._world
        names = ", ".join(f"rank {rank}" for rank in missing) or "rank 0's answer"
        return WorldNotFormed(
            f"rank {world.rank} of {world.size}: the world did not form within {self._timeout_s:g} s; missing: {names} "
            f"(rendezvous at {world.master_addr}:{world.master_port}, world read from: {world.source}); check that "
            f"they were started, still run, and have the same MASTER_ADDR and MASTER_PORT, or raise timeout=",
            missing=missing,
        )

    def _withdraw(self) -> None:
        with suppress(DistNetworkError):  # rank 0 and its store may leave first, and the announcement with them
            self._store.delete_key(self._rank_key(self._world.rank))
            self._base.delete_key(f"holder/{self._world.rank}")
            if not self._store.check(["decision"]):
                # This rendezvous may still succeed, with this rank in it when it tries again.
                self._base.add(f"round/{self._world.rank}", -1)

    @staticmethod
    def _rank_key(rank: int) -> str:
        return f"rank/{rank}"
