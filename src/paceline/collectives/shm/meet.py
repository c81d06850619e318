"""How ranks of one host find each other and exchange descriptors.

Twice every rank posts a line on the group's store and reads those of all: who it is, and whether it got through to the
others. So all come to the same answer, and none is left alone with half a mesh.
"""

import json
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.api import Watch
from paceline.collectives.peers import StoreCall
from paceline.collectives.shm import memory
from paceline.collectives.shm.link import Link
from paceline.collectives.shm.memory import Descriptor
from paceline.collectives.shm.mesh import Mesh, eventfd
from paceline.collectives.shm.presence import Presence, Refusal, share_host
from paceline.collectives.shm.record import NBYTES, ControlPage
from paceline.collectives.wait import finish
from paceline.errors import CollectiveError, PacelineError

CONNECT_S = 20.0  # for one peer that has posted its address
SLICE_S = 0.1


def meet(store: Store, rank: int, size: int, *, watch: Watch, timeout_s: float | None) -> Mesh | Refusal:
    """Form the mesh of all ranks of a group, or learn why that cannot be. Every rank of the group must call it."""
    place = next_meeting(store, rank)
    with Door(rank) as door:
        everyone = introduce(place, door.presence, size, watch=watch, timeout_s=timeout_s)
        refusal = share_host(everyone)
        if refusal is not None:
            return refusal
        return connect(place, door, everyone, everyone, watch=watch, timeout_s=timeout_s)


def next_meeting(store: Store, rank: int) -> Store:
    """A part of the store that nobody has written to yet: the n-th meeting of one rank is the n-th of every other."""
    return PrefixStore(f"paceline/meeting {store.add(f'paceline/meetings/{rank}', 1)}", store)


class Door:
    """Where this rank can be reached, from before it says so until the mesh stands."""

    def __init__(self, rank: int, wish: str = "") -> None:
        self.presence = Presence.own(rank, wish)
        self.listener: socket.socket | None = None

    def __enter__(self) -> "Door":
        if not self.presence.cannot:
            self.listener = _seqpacket()
            self.listener.bind(self.presence.address)
            self.listener.listen(4096)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.listener is not None:
            self.listener.close()


def introduce(place: Store, own: Presence, size: int, *, watch: Watch, timeout_s: float | None) -> list[Presence]:
    """Tell all ranks of the group who this one is, and learn who they are."""
    told = tell_all(place, "presence", own.rank, size, own.encode(), watch, timeout_s)
    return [Presence.decode(text) for text in told]


def connect(
    place: Store,
    door: Door,
    everyone: Sequence[Presence],
    here: Sequence[Presence],
    *,
    watch: Watch,
    timeout_s: float | None,
) -> Mesh | Refusal:
    """Form the mesh of the ranks `here`. All of `everyone` ask at the same time, and go on only if all succeed."""
    formed: list[Mesh | Refusal] = []
    calling = StoreCall[None](lambda call: formed.append(_Connecting(place, door, here, call).run()))
    try:
        finish(calling, what="the meeting of the ranks of this host", watch=watch, timeout_s=timeout_s)
    except BaseException:
        calling.stop()
        for mesh in formed:
            _close(mesh)
        raise
    mesh = formed[0]
    failed = mesh.reason if isinstance(mesh, Refusal) else ""
    try:
        told = tell_all(place, "formed", door.presence.rank, len(everyone), failed, watch, timeout_s)
    except BaseException:
        _close(mesh)
        raise
    reasons = [text.decode() for text in told if text]
    if reasons:
        _close(mesh)
        return Refusal(reasons[0])
    return mesh


def _close(mesh: Mesh | Refusal) -> None:
    if isinstance(mesh, Mesh):
        mesh.close()


def tell_all(
    place: Store, topic: str, rank: int, size: int, text: str, watch: Watch, timeout_s: float | None
) -> list[bytes]:
    """Post one line and read those of all ranks."""
    keys = [f"{topic}/{peer}" for peer in range(size)]

    def exchange(call: StoreCall[list[bytes]]) -> list[bytes]:
        place.set(keys[rank], "." + text)
        pause_s = 0.0005
        while not place.check(keys):
            if not call.pause(pause_s):
                return []
            pause_s = min(1.2 * pause_s, 0.02)
        return [found[1:] for found in place.multi_get(keys)]

    posting = StoreCall(exchange)
    try:
        what = f"the choice of a transport ({topic})"
        finish(posting, what=what, watch=watch, timeout_s=timeout_s)
    finally:
        posting.stop()
    return posting.result()


class _Connecting:
    """Makes one link with each of the others. Runs on a thread, and ends soon after it is told to stop.

    Higher ranks call lower ones. A call goes through before it is answered, since the listener's queue holds all of
    them, so nobody waits in a circle: first call, then answer, then hear the answers.
    """

    def __init__(self, place: Store, door: Door, here: Sequence[Presence], call: StoreCall[None]) -> None:
        self._place = place
        self._own = door.presence
        self._listener = door.listener
        self._here = here
        self._call = call
        self._until = time.monotonic() + CONNECT_S
        self._links: dict[int, Link] = {}

    def run(self) -> Mesh | Refusal:
        rank = self._own.rank
        ranks = [peer.rank for peer in self._here]
        with ExitStack() as sockets:
            try:
                self._page_memory = memory.create(NBYTES, "a control page")
                page = ControlPage(self._page_memory)
                called = [self._call_up(peer, sockets) for peer in self._here if peer.rank < rank]
                self._answer({peer.rank: peer for peer in self._here if peer.rank > rank}, sockets)
                for peer, line, inbound, outbound in called:
                    self._links[peer.rank] = Link(peer.rank, line, inbound, outbound, self._hear_page(peer, line))
            except (OSError, PacelineError, ValueError) as error:
                return self._failed(f"rank {rank} could not connect to the other ranks of its host: {error}")
            sockets.pop_all()
        links = [self._links[peer] for peer in ranks if peer != rank]
        for link in links:
            link.connection.setblocking(False)
        return Mesh(ranks, ranks.index(rank), links, page)

    def _call_up(self, peer: Presence, sockets: ExitStack) -> tuple[Presence, socket.socket, Descriptor, Descriptor]:
        line = sockets.enter_context(_seqpacket())
        line.settimeout(CONNECT_S)
        line.connect(peer.address)
        if _user_of(line) != self._own.user:
            raise CollectiveError(f"the process that answers for rank {peer.rank} belongs to another user")
        to_peer, to_own = eventfd(), eventfd()
        hello = json.dumps([peer.token, self._own.rank, self._own.token]).encode()
        numbers = [to_peer.number, to_own.number, self._page_memory.number]
        socket.send_fds(line, [hello], numbers, socket.MSG_NOSIGNAL)
        return peer, line, to_own, to_peer

    def _answer(self, expected: dict[int, Presence], sockets: ExitStack) -> None:
        assert self._listener is not None
        self._listener.settimeout(SLICE_S)
        while expected:
            self._check_time(f"rank {min(expected)} did not call")
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                continue
            link = self._admit(line, expected)
            if link is None:  # a stranger: the names of sockets can be listed
                line.close()
                continue
            sockets.enter_context(line)
            del expected[link.rank]
            self._links[link.rank] = link

    def _admit(self, line: socket.socket, expected: dict[int, Presence]) -> Link | None:
        line.settimeout(1.0)
        if _user_of(line) != self._own.user:
            return None
        try:
            data, (inbound, outbound, page) = _receive(line, 3)
            target, rank, token = json.loads(data)
        except (TimeoutError, ValueError):
            return None
        if target != self._own.token or rank not in expected or token != expected[rank].token:
            return None
        socket.send_fds(line, [b"welcome"], [self._page_memory.number], socket.MSG_NOSIGNAL)
        return Link(rank, line, inbound, outbound, ControlPage(page))

    def _hear_page(self, peer: Presence, line: socket.socket) -> ControlPage:
        line.settimeout(SLICE_S)
        while True:
            self._check_time(f"rank {peer.rank} did not answer")
            with suppress(TimeoutError):
                _, descriptors = _receive(line, 1)
                return ControlPage(descriptors[0])

    def _failed(self, reason: str) -> Refusal:
        """Say so before the sockets close, so that the others name the cause and not what follows from it."""
        if self._place.check(["failed"]):
            return Refusal(self._place.get("failed").decode())
        self._place.set("failed", reason)
        return Refusal(reason)

    def _check_time(self, complaint: str) -> None:
        if self._place.check(["failed"]):
            raise CollectiveError("another rank failed")
        if time.monotonic() > self._until or not self._call.pause(0):
            raise CollectiveError(f"{complaint} within {CONNECT_S:g} s")


def _receive(line: socket.socket, count: int) -> tuple[bytes, list[Descriptor]]:
    data, numbers, _, _ = socket.recv_fds(line, 4096, count, socket.MSG_CMSG_CLOEXEC)
    descriptors = [Descriptor(number) for number in numbers]
    if len(descriptors) != count:
        raise ValueError(f"expected {count} descriptors from a peer, got {len(descriptors)}")
    return data, descriptors


def _seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(line: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
