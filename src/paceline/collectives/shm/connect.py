"""Which ranks can share memory, and how those of one host connect with each other and exchange descriptors.

Every rank then tells all others whether it succeeded. So all come to the same answer, and none is left alone with
half a mesh.
"""

import json
import os
import re
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.collectives.peers import FOREIGN
from paceline.collectives.shm import memfd
from paceline.collectives.shm.memfd import Descriptor
from paceline.collectives.shm.mesh import PAGE_BYTES, ControlPage, Mesh, PeerLink, eventfd
from paceline.collectives.store_call import StoreCall
from paceline.collectives.store_gather import NoSharedMemory, Rendezvous
from paceline.errors import CollectiveError, Malformed, MessageDamaged, PacelineError, SharedMemoryFull
from paceline.typed_json import read_json

CONNECT_S = 20.0  # for one peer that has posted its address
SLICE_S = 0.1
MAX_UNKNOWN = 128  # connections that have not identified themselves yet
_HELLO: Any = tuple[str, int, str]  # the token of the called rank; the rank and the token of the caller


@dataclass(frozen=True)
class PeerInfo:
    """One rank. `cannot` says why it cannot share memory with any other; `requested` is the transport that its user
    requested."""

    rank: int
    boot: str
    network: str  # namespace; the names of abstract sockets are known within one
    user: int
    hostname: str
    token: str
    cannot: str = ""
    requested: str = ""

    @classmethod
    def own(cls, rank: int, requested: str = "") -> "PeerInfo":
        cannot, boot, network = _missing(), "", ""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = str(Path("/proc/self/ns/net").readlink())
        except OSError as error:
            cannot = cannot or f"cannot tell which host it runs on ({error})"
        host = socket.gethostname()
        user = os.getuid() if hasattr(os, "getuid") else -1
        return cls(rank, boot, network, user, host, secrets.token_hex(16), cannot, requested)

    @property
    def host(self) -> tuple[str, str, int]:
        """Equal for ranks that can share memory."""
        return self.boot, self.network, self.user

    @property
    def address(self) -> bytes:
        """An abstract one: there is no file to leave behind."""
        return b"\0paceline-" + self.token.encode()

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str, rank: int) -> "PeerInfo":
        """The info that a rank has posted. Raises MessageDamaged if it is malformed."""
        try:
            found = read_json(cls, text, f"the address of rank {rank}")
        except Malformed as error:
            raise MessageDamaged(f"{error}; {FOREIGN}", ranks=[rank]) from error
        if found.rank != rank or not re.fullmatch("[0-9a-f]{32}", found.token):
            raise MessageDamaged(f"expected the address of rank {rank}, got {found}; {FOREIGN}", ranks=[rank])
        return found


def _missing() -> str:
    """What this process lacks to share memory."""
    if sys.platform != "linux":
        return f"runs on {sys.platform}, and shared memory needs Linux"
    for name in ("memfd_create", "eventfd"):
        if not hasattr(os, name):
            return f"has a Python without os.{name}"
    try:
        memfd.create(memfd.PAGE, "a first try")
        eventfd()
    except (OSError, SharedMemoryFull) as error:
        return f"is not allowed to create shared memory ({error})"
    return ""


def hosts(everyone: Sequence[PeerInfo]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for one in everyone:
        found.setdefault(one.host, []).append(one.rank)
    return list(found.values())


def check_share_host(everyone: Sequence[PeerInfo]) -> None:
    """Raise NoSharedMemory if these ranks cannot share memory. All ranks come to the same answer."""
    for one in everyone:
        if one.cannot:
            raise NoSharedMemory(f"rank {one.rank} {one.cannot}")
    first = everyone[0]
    for one in everyone[1:]:
        if one.boot != first.boot:
            raise NoSharedMemory(
                f"rank {one.rank} runs on another host ({one.hostname}) than rank {first.rank} ({first.hostname})"
            )
        if one.network != first.network:
            raise NoSharedMemory(
                f"rank {one.rank} runs in another container than rank {first.rank} (network namespace {one.network}, "
                f"not {first.network})"
            )
        if one.user != first.user:
            raise NoSharedMemory(f"rank {one.rank} runs as user {one.user}, and rank {first.rank} as user {first.user}")


class PeerListener:
    """The socket at which this rank can be reached, open from before it is announced until the mesh is complete."""

    def __init__(self, rank: int, requested: str = "") -> None:
        self.own = PeerInfo.own(rank, requested)
        self.socket: socket.socket | None = None

    def __enter__(self) -> "PeerListener":
        if not self.own.cannot:
            self.socket = _seqpacket()
            self.socket.bind(self.own.address)
            self.socket.listen(4096)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.socket is not None:
            self.socket.close()


def connect(rendezvous: Rendezvous, listener: PeerListener, here: Sequence[PeerInfo]) -> Mesh:
    """Form the mesh of the ranks `here`. All ranks of the group call it, and continue only if all succeed."""
    connecting, failed = _Connecting(rendezvous.place, listener, here), ""
    try:
        try:
            rendezvous.call(connecting.run, what="the rendezvous of the ranks of this host")
        except NoSharedMemory as error:
            failed = str(error)
        rendezvous.check("formed", failed)
    except BaseException:
        if connecting.mesh is not None:
            connecting.mesh.close()
        raise
    assert connecting.mesh is not None
    return connecting.mesh


class _Connecting:
    """Makes one link with each of the others. Runs on a thread, and ends soon after it is told to stop.

    Higher ranks call lower ones. A connection succeeds before it is accepted, because the listener's queue holds all of
    them, so there is no circular wait: first connect, then accept, then read the answers.
    """

    def __init__(self, place: Store, listener: PeerListener, here: Sequence[PeerInfo]) -> None:
        self._place = place
        self._own = listener.own
        self._listener = listener.socket
        self._here = here
        self._until = time.monotonic() + CONNECT_S
        self._links: dict[int, PeerLink] = {}
        self.mesh: Mesh | None = None

    def run(self, call: StoreCall[None]) -> None:
        self._call = call
        rank = self._own.rank
        ranks = [peer.rank for peer in self._here]
        with ExitStack() as sockets:
            try:
                self._page_memory = memfd.create(PAGE_BYTES, "a control page")
                page = ControlPage(self._page_memory)
                called = [self._call_up(peer, sockets) for peer in self._here if peer.rank < rank]
                self._answer({peer.rank: peer for peer in self._here if peer.rank > rank}, sockets)
                for peer, connection, inbound, outbound in called:
                    self._links[peer.rank] = PeerLink(
                        peer.rank, connection, inbound, outbound, self._hear_page(peer, connection)
                    )
            except (OSError, PacelineError, ValueError) as error:
                raise self._failure(f"rank {rank} could not connect to the other ranks of its host: {error}") from error
            sockets.pop_all()
        links = [self._links[peer] for peer in ranks if peer != rank]
        for link in links:
            link.notices.connection.setblocking(False)
        self.mesh = Mesh(ranks, ranks.index(rank), links, page)

    def _call_up(self, peer: PeerInfo, sockets: ExitStack) -> tuple[PeerInfo, socket.socket, Descriptor, Descriptor]:
        connection = sockets.enter_context(_seqpacket())
        connection.settimeout(CONNECT_S)
        connection.connect(peer.address)
        if _user_of(connection) != self._own.user:
            raise CollectiveError(f"the process that answers for rank {peer.rank} belongs to another user")
        to_peer, to_own = eventfd(), eventfd()
        hello = json.dumps([peer.token, self._own.rank, self._own.token]).encode()
        numbers = [to_peer.number, to_own.number, self._page_memory.number]
        socket.send_fds(connection, [hello], numbers, socket.MSG_NOSIGNAL)
        return peer, connection, to_own, to_peer

    def _answer(self, expected: dict[int, PeerInfo], sockets: ExitStack) -> None:
        """Accept the ranks above this one. Socket names can be listed, so other processes may connect too: a connection
        that sends nothing blocks no one."""
        assert self._listener is not None
        self._listener.setblocking(False)
        unknown: dict[socket.socket, None] = {}  # in the order in which they came
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            try:
                while expected:
                    self._check_time(f"rank {min(expected)} did not connect")
                    for key, _ in ready.select(SLICE_S):
                        connection = key.fileobj
                        assert isinstance(connection, socket.socket)
                        if connection is self._listener:
                            self._accept(ready, unknown)
                        elif connection in unknown:  # it may have had to make room for another one
                            del unknown[connection]
                            ready.unregister(connection)
                            link = self._admit(sockets.enter_context(connection), expected)
                            if link is None:
                                connection.close()
                                continue
                            del expected[link.rank]
                            self._links[link.rank] = link
            finally:
                for connection in unknown:
                    connection.close()

    def _accept(self, ready: selectors.BaseSelector, unknown: dict[socket.socket, None]) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has disconnected again
            return
        if _user_of(connection) != self._own.user:
            connection.close()
            return
        if len(unknown) == MAX_UNKNOWN:
            oldest = next(iter(unknown))
            del unknown[oldest]
            ready.unregister(oldest)
            oldest.close()
        unknown[connection] = None
        ready.register(connection, selectors.EVENT_READ)

    def _admit(self, connection: socket.socket, expected: dict[int, PeerInfo]) -> PeerLink | None:
        """The link to the caller, if it is one of the expected ranks."""
        connection.settimeout(1.0)
        try:
            data, (inbound, outbound, page) = _receive(connection, 3)
            target, rank, token = read_json(_HELLO, data, "a rank's call")
        except (OSError, ValueError):
            return None
        if target != self._own.token or rank not in expected or token != expected[rank].token:
            return None
        socket.send_fds(connection, [b"welcome"], [self._page_memory.number], socket.MSG_NOSIGNAL)
        return PeerLink(rank, connection, inbound, outbound, ControlPage(page))

    def _hear_page(self, peer: PeerInfo, connection: socket.socket) -> ControlPage:
        connection.settimeout(SLICE_S)
        while True:
            self._check_time(f"rank {peer.rank} did not answer")
            with suppress(TimeoutError):
                _, descriptors = _receive(connection, 1)
                return ControlPage(descriptors[0])

    def _failure(self, reason: str) -> NoSharedMemory:
        """Report it before the sockets close, so that the others name the cause and not its consequences."""
        if self._place.check(["failed"]):
            return NoSharedMemory(self._place.get("failed").decode())
        self._place.set("failed", reason)
        return NoSharedMemory(reason)

    def _check_time(self, complaint: str) -> None:
        if self._place.check(["failed"]):
            raise CollectiveError("another rank failed to connect")
        if time.monotonic() > self._until or not self._call.pause(0):
            raise CollectiveError(f"{complaint} within {CONNECT_S:g} s")


def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[Descriptor]]:
    data, descriptors = memfd.receive(connection, 4096, count)
    if len(descriptors) != count:
        raise ValueError(f"expected {count} descriptors from a peer, got {len(descriptors)}")
    return data, descriptors


def _seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
