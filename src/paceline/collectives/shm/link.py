"""What connects two ranks of one host: a socket for descriptors and hang-ups, and one counter in each direction."""

import errno
import json
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass

import torch

from paceline.collectives.shm import memory
from paceline.collectives.shm.memory import Descriptor
from paceline.collectives.shm.record import ControlPage
from paceline.errors import CollectiveError

BEGUN = 1
FINISHED = 1 << 32
HALF = FINISHED - 1
LARGEST_NOTICE = 4096
_ARENA, _FREED, _FAREWELL = range(3)
_HEAD = struct.Struct("<bqq")


@dataclass(frozen=True)
class Farewell:
    """Why a peer left. `ranks` are those at fault: it waited for them in vain, or there was a `mismatch` of calls."""

    why: str
    ranks: tuple[int, ...] = ()
    mismatch: bool = False


@dataclass(frozen=True)
class Notice:
    """One message to a peer."""

    data: bytes
    descriptor: Descriptor | None = None

    @classmethod
    def of_arena(cls, number: int, nbytes: int, descriptor: Descriptor) -> "Notice":
        return cls(_HEAD.pack(_ARENA, number, nbytes), descriptor)

    @classmethod
    def of_freed(cls, number: int) -> "Notice":
        return cls(_HEAD.pack(_FREED, number, 0))

    @classmethod
    def of_farewell(cls, farewell: Farewell) -> "Notice":
        text = json.dumps([farewell.why[:500], farewell.ranks[:100], farewell.mismatch], ensure_ascii=False)
        return cls(_HEAD.pack(_FAREWELL, 0, 0) + text.encode())


class Link:
    """The link to one peer. `rank` is the peer's number within the group."""

    def __init__(
        self, rank: int, connection: socket.socket, inbound: Descriptor, outbound: Descriptor, page: ControlPage
    ) -> None:
        self.rank = rank
        self.connection = connection
        self.inbound = inbound
        self.page = page
        self.hint = page.hint
        self.begun = 0  # collectives that the peer has begun, so far as it was read from the kernel
        self.finished = 0
        self.seen = 0  # the same two as the peer's hint would say them
        self.arenas: dict[int, torch.Tensor] = {}  # the peer's memory, by the peer's numbers
        self.freed: list[int] = []  # of these, the ones the peer has given up; for the engine to forget
        self.received = 0
        self.gone: Farewell | None = None
        self._ended = False  # nothing more will come
        self._outbound = outbound
        self._unsent: deque[Notice] = deque()

    def signal(self, value: int) -> None:
        os.eventfd_write(self._outbound.number, value)

    def count(self) -> bool:
        """Read from the kernel what the peer has signalled. False if that is nothing new."""
        try:
            value = os.eventfd_read(self.inbound.number)
        except BlockingIOError:
            return False
        self.begun += value & HALF
        self.finished += value >> 32
        self.seen = (self.begun & HALF) | (self.finished & HALF) << 32
        return True

    def queue(self, notice: Notice) -> None:
        if self.gone is None:
            self._unsent.append(notice)

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it. True when nothing is left."""
        unsent, flags = self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while unsent:
            notice = unsent[0]
            descriptors = [] if notice.descriptor is None else [notice.descriptor.number]
            try:
                socket.send_fds(self.connection, [notice.data], descriptors, flags)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    return False
                self._leave(Farewell(str(error.strerror)))  # what it has sent can still be received
                return True
            unsent.popleft()
        return True

    def receive(self) -> None:
        """Take all notices that have come."""
        resets = 0
        while not self._ended:
            try:
                data, numbers, _, _ = socket.recv_fds(
                    self.connection, LARGEST_NOTICE, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Said once, before what the peer sent last, if it left without reading what we sent.
                resets += 1
                data, numbers = (b"", []) if resets > 1 else (b"?", [])
            descriptors = [Descriptor(number) for number in numbers]
            if not data:
                self._ended = True
                self._leave(Farewell("it hung up"))
            elif data != b"?":
                self._take(data, descriptors)

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        """Also for children that were forked off: the counters are the parent's, and are not read."""
        self._ended = True
        self._part(Farewell("this rank closed its transport"))
        self.connection.close()
        self.inbound.close()
        self._outbound.close()
        self.arenas.clear()

    def _leave(self, farewell: Farewell) -> None:
        """The peer has left. All that it signalled before that still counts; nothing will follow."""
        self._part(farewell)
        self.count()

    def _part(self, farewell: Farewell) -> None:
        self.gone = self.gone or farewell
        self._unsent.clear()

    def _take(self, data: bytes, descriptors: list[Descriptor]) -> None:
        kind, number, nbytes = _HEAD.unpack_from(data)
        if kind == _FAREWELL:
            self._ended = True
            why, ranks, mismatch = json.loads(data[_HEAD.size :])
            self._leave(Farewell(why, tuple(ranks), mismatch))
            return
        self.received += 1
        if kind == _FREED:
            self.arenas.pop(number, None)
            self.freed.append(number)
            return
        if not descriptors or os.fstat(descriptors[0].number).st_size < nbytes:
            raise CollectiveError(
                f"rank {self.rank} shared {nbytes:,} bytes, and their descriptor did not arrive: this process may have "
                f"too many open files (see `ulimit -n`)",
                ranks=[self.rank],
            )
        # Not populated: this rank touches its own slice only.
        self.arenas[number] = memory.tensor_of(memory.map_shared(descriptors[0], nbytes, populate=False))
