"""The messages between two ranks of one host over a socket: memory that is shared or freed, and why a rank leaves."""

import errno
import json
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.shm import memfd
from paceline.collectives.shm.memfd import Descriptor
from paceline.errors import CollectiveError, Malformed, MessageDamaged
from paceline.typed_json import read_json

LARGEST_NOTICE = 4096
_ARENA, _FREED, _EXIT = range(3)
_HEAD = struct.Struct("<bqq")
_REASON: Any = tuple[str, tuple[int, ...], bool]


@dataclass(frozen=True)
class PeerExit:
    """Why a peer left. `ranks` are those at fault: its wait for them timed out, or there was a `mismatch` of calls."""

    why: str
    ranks: tuple[int, ...] = ()
    mismatch: bool = False


Notice = tuple[bytes, Descriptor | None]  # one message to a peer, and the descriptor that goes with it


def arena_notice(number: int, nbytes: int, descriptor: Descriptor) -> Notice:
    return _HEAD.pack(_ARENA, number, nbytes), descriptor


def freed_notice(number: int) -> Notice:
    return _HEAD.pack(_FREED, number, 0), None


def exit_notice(reason: PeerExit) -> Notice:
    text = json.dumps([reason.why[:500], reason.ranks[:100], reason.mismatch], ensure_ascii=False)
    return _HEAD.pack(_EXIT, 0, 0) + text.encode(), None


class NoticeSocket:
    """The socket to one peer. `rank` is the peer's number within the group."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.arenas: dict[int, torch.Tensor] = {}  # the peer's memory, by the peer's numbers
        self.freed: list[int] = []  # arenas that the peer has freed; the engine drops them
        self.received = 0
        self.gone: PeerExit | None = None
        self._ended = False  # nothing more will come
        self.unsent: deque[Notice] = deque()

    def queue(self, notice: Notice) -> None:
        if self.gone is None:
            self.unsent.append(notice)

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it. True when nothing is left."""
        unsent, flags = self.unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while unsent:
            data, descriptor = unsent[0]
            try:
                socket.send_fds(self.connection, [data], [] if descriptor is None else [descriptor.number], flags)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    return False
                self._leave(PeerExit(str(error.strerror)))  # its earlier messages can still be received
                return True
            unsent.popleft()
        return True

    def receive(self) -> None:
        """Take all notices that have arrived. The socket does not block."""
        resets = 0
        while not self._ended:
            try:
                data, descriptors = memfd.receive(self.connection, LARGEST_NOTICE, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The kernel reports it once, before the peer's last messages, if the peer left with unread data.
                resets += 1
                if resets == 1:
                    continue
                data, descriptors = b"", []
            if data:
                self._take(data, descriptors)
            else:
                self._ended = True
                self._leave(PeerExit("it hung up"))

    def close(self) -> None:
        self._ended = True
        self._leave(PeerExit("this rank closed its transport"))
        self.connection.close()
        self.arenas.clear()

    def _leave(self, reason: PeerExit) -> None:
        self.gone = self.gone or reason
        self.unsent.clear()

    def _take(self, data: bytes, descriptors: list[Descriptor]) -> None:
        kind, number, nbytes = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (-1, 0, 0)
        if kind not in (_ARENA, _FREED, _EXIT) or nbytes < 0:
            raise MessageDamaged(
                f"rank {self.rank} sent a notice of {len(data)} bytes that is malformed", ranks=[self.rank]
            )
        if kind == _EXIT:
            self._ended = True
            try:
                self._leave(PeerExit(*read_json(_REASON, data[_HEAD.size :], f"why rank {self.rank} leaves")))
            except Malformed as error:
                raise MessageDamaged(str(error), ranks=[self.rank]) from error
            return
        self.received += 1
        if kind == _FREED:
            self.arenas.pop(number, None)
            self.freed.append(number)
            return
        if not descriptors or os.fstat(descriptors[0].number).st_size < nbytes:
            raise CollectiveError(
                f"rank {self.rank} shared {nbytes:,} bytes, but the file descriptor did not arrive: this process may "
                f"have too many open files (see `ulimit -n`)",
                ranks=[self.rank],
            )
        # Not populated: this rank touches its own slice only.
        self.arenas[number] = memfd.tensor_of(memfd.map_shared(descriptors[0], nbytes, populate=False))
