"""All links of one rank with the others of its host, and what they know of each other's progress."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

import torch

from paceline.collectives.shm.arenas import Arena
from paceline.collectives.shm.link import BEGUN, FINISHED, HALF, Farewell, Link, Notice
from paceline.collectives.shm.memory import Descriptor
from paceline.collectives.shm.record import ControlPage

SPIN_S = 0.0003


class Mesh:
    """One rank's place among the `ranks` of its host (their numbers within the group), `place` being its own.

    Why data is seen by whoever has read the counter
    ------------------------------------------------
    CPUs other than x86 let plain stores become visible in another order than they were made. So a rank never concludes
    from a plain load that another's data is there. Who publishes writes its data and its record, and then adds to an
    eventfd; who reads takes the count out of it. The kernel does both under the spinlock of the eventfd. Leaving a
    spinlock is a release (all loads and stores before it are done), entering it an acquire (none after it has begun),
    and the reader entered after the writer left, since it saw the writer's addition. So what was written before `begun`
    is visible to the rank that sums; what it wrote before `finished` is visible to all; and its reads are over before
    an owner who has counted `finished` writes to its memory again.

    The counters that each rank also keeps in its control page, as plain words, are a hint only: they say when the
    system call is worth while. One that is seen late delays nobody who waits, since waits block on the eventfds. One
    that is seen early finds nothing in the eventfd, and nothing is concluded.
    """

    def __init__(self, ranks: Sequence[int], place: int, links: Sequence[Link], page: ControlPage) -> None:
        self.ranks = tuple(ranks)
        self.place = place
        self.page = page
        self.links = tuple(links)  # in the order of ranks, this one left out
        self.begun = 0  # collectives that all the others have begun
        self.finished = 0
        self.notices = 0
        self._own_begun = 0
        self._own_finished = 0
        self._pid = os.getpid()
        self._closed = False
        self._unsent = False
        cores = len(os.sched_getaffinity(0))
        self._spin_s = SPIN_S if len(self.ranks) <= cores else 0.0

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def closed(self) -> bool:
        return self._closed

    def is_mine(self) -> bool:
        """False in a child that was forked off: the descriptors are there, but the seat belongs to the parent."""
        return os.getpid() == self._pid

    # Telling -------------------------------------------------------------------------------------------------------

    def begin(self, word: int, numel: int, arena: int, offset: int) -> None:
        """Publish the next collective of this rank."""
        self.page.write(self._own_begun, word, numel, arena, offset, self.notices)
        self._own_begun += 1
        self._signal(BEGUN)

    def finish(self) -> None:
        """Say that this rank has done its part of the next collective."""
        self._own_finished += 1
        self._signal(FINISHED)

    def _signal(self, value: int) -> None:
        for link in self.links:
            link.signal(value)
        self.page.hint[0] = (self._own_begun & HALF) | (self._own_finished & HALF) << 32
        if not self.links:
            self._add_up()

    def share(self, arena: Arena) -> None:
        """Send an arena's descriptor to all peers; they have it before the next collective that is begun."""
        descriptor, arena.descriptor = arena.descriptor, None
        assert descriptor is not None
        self._tell(Notice.of_arena(arena.number, arena.bytes.numel(), descriptor))

    def take_back(self, number: int) -> None:
        """Let all peers forget an arena."""
        self._tell(Notice.of_freed(number))

    def _tell(self, notice: Notice) -> None:
        self.notices += 1
        self._unsent = True
        for link in self.links:
            link.queue(notice)

    def flush(self) -> bool:
        """Send queued notices, as far as the sockets take them. True when nothing is left."""
        if self._unsent:
            left = [link for link in self.links if not link.flush()]
            self._unsent = bool(left)
            self._add_up()
        return not self._unsent

    # Learning ------------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Learn what others have begun and finished, at no cost when that is nothing. True if something is new."""
        new = False
        for link in self.links:
            if link.hint[0] > link.seen and link.count():
                new = True
        if new:
            self._add_up()
        return new

    def calls(self, number: int) -> list[bytes]:
        """What each rank said about a collective that all have begun, in rank order."""
        calls = []
        for link in self.links:
            if link.received < link.page.notices(number):
                link.receive()
                self._add_up()  # it may have left
                if link.received < link.page.notices(number):
                    raise RuntimeError(f"connection closed by rank {link.rank}, before it had shared its memory")
            calls.append(link.page.call(number))
        calls.insert(self.place, self.page.call(number))
        return calls

    def memory_of(self, place: int, arena: int) -> torch.Tensor:
        """An arena of another rank."""
        return self.links[place if place < self.place else place - 1].arenas[arena]

    def sleep(self, awaited: Sequence[Link], seconds: float) -> "Heard":
        """Block until one of `awaited` signals, any peer sends or hangs up, or the time is over. What was heard is to
        be heeded. It changes nothing, so several threads may sleep.

        Where every rank has a core it looks at the hints for a moment first: to put a core to sleep and wake it up
        takes several times as long as a small collective.
        """
        if self._spin_s:
            until = time.perf_counter() + min(seconds, self._spin_s)
            while time.perf_counter() < until:
                for link in awaited:
                    if link.hint[0] > link.seen:
                        return [(link, False)]
        poll = select.poll()
        numbers: dict[int, tuple[Link, bool]] = {}
        for link in self.links:
            if link.gone is None:
                numbers[link.connection.fileno()] = link, True
                poll.register(link.connection, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        for link in awaited:
            numbers[link.inbound.number] = link, False
            poll.register(link.inbound.number, select.POLLIN)
        return [numbers[number] for number, _ in poll.poll(seconds * 1000)]

    def heed(self, heard: "Heard") -> None:
        """Take what these peers have signalled and sent."""
        for link, spoke in heard:
            if spoke:
                link.receive()
            else:
                link.count()
        self._add_up()

    def _add_up(self) -> None:
        # A rank that is alone on its host waits for nobody there.
        self.begun = min((link.begun for link in self.links), default=self._own_begun)
        self.finished = min((link.finished for link in self.links), default=self._own_finished)

    # Leaving -------------------------------------------------------------------------------------------------------

    def leave(self, farewell: Farewell) -> None:
        """Hang up on all peers, saying why. What was signalled still counts, and so does what they have signalled."""
        if not self.is_mine():
            return
        for link in self.links:
            if link.gone is None:
                link.queue(Notice.of_farewell(farewell))
                link.flush()
            with contextlib.suppress(OSError):  # it may have hung up first
                link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back every descriptor and every mapping of the others' memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.leave(Farewell("it closed its transport"))
        for link in self.links:
            link.close()


Heard = list[tuple[Link, bool]]  # who signalled (False) or sent something (True)


def eventfd() -> Descriptor:
    return Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
