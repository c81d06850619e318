"""All links of one rank with the others of its host, and each other's progress."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

import torch

from paceline.collectives.shm import memfd
from paceline.collectives.shm.arenas import Arena
from paceline.collectives.shm.memfd import Descriptor
from paceline.collectives.shm.notices import Notice, NoticeSocket, PeerExit, arena_notice, exit_notice, freed_notice

SPIN_S = 0.0003
RING = 256  # collectives that a rank may have begun and not completed
WORDS = 8
PAGE_BYTES = (1 + RING) * WORDS * 8
# A signal adds one of these to a counter.
BEGUN = 1
FINISHED = 1 << 32
HALF = FINISHED - 1


class ControlPage:
    """The page in which one rank writes a record of each collective that it begins, and its counters as a hint.

    See `Mesh` for who reads what when.
    """

    def __init__(self, descriptor: Descriptor) -> None:
        buffer = memfd.map_shared(descriptor, PAGE_BYTES, populate=True)
        self._bytes = memoryview(buffer).cast("B")
        self._words = self._bytes.cast("q")
        self.hint = self._bytes.cast("Q")  # its first word: how often this rank has begun and finished

    def write(self, number: int, code: int, numel: int, arena: int, offset: int, notices: int) -> None:
        words, at = self._words, (1 + number % RING) * WORDS
        words[at] = number
        words[at + 1] = code
        words[at + 2] = numel
        words[at + 3] = arena
        words[at + 4] = offset
        words[at + 5] = notices

    def call(self, number: int) -> bytes:
        """The four words that say what to do with which memory, as bytes: they can be compared and looked up."""
        at = (1 + number % RING) * WORDS * 8
        return self._bytes[at + 8 : at + 40].tobytes()

    def notices(self, number: int) -> int:
        """How many notices the rank had sent when it began this collective."""
        at = (1 + number % RING) * WORDS
        assert self._words[at] == number
        return self._words[at + 5]


class PeerLink:
    """The link to one peer: a counter in each direction, the peer's control page, and a socket for notices."""

    def __init__(
        self, rank: int, connection: socket.socket, inbound: Descriptor, outbound: Descriptor, page: ControlPage
    ) -> None:
        self.rank = rank
        self.notices = NoticeSocket(rank, connection)
        self.inbound = inbound
        self.outbound = outbound
        self.page = page
        self.hint = page.hint
        self.begun = 0  # collectives that the peer has begun, so far as it was read from the kernel
        self.finished = 0
        self.seen = 0  # the same two as the peer's hint would say them

    def count(self) -> bool:
        """Read the peer's signals from the kernel. False if there is nothing new."""
        try:
            value = os.eventfd_read(self.inbound.number)
        except BlockingIOError:
            return False
        self.begun += value & HALF
        self.finished += value >> 32
        self.seen = (self.begun & HALF) | (self.finished & HALF) << 32
        return True

    def flush(self) -> bool:
        """Send queued notices, as far as the socket takes them. True when nothing is left."""
        sent = self.notices.flush()
        self.count()  # if the peer has left: its earlier signals still count
        return sent

    def receive(self) -> None:
        """Take all notices that have arrived."""
        self.notices.receive()
        self.count()  # as above

    def close(self) -> None:
        """Also in forked children: the counters are the parent's, and are not read."""
        self.notices.close()
        self.inbound.close()
        self.outbound.close()


Events = list[tuple[PeerLink, bool]]  # who signalled (False) or sent something (True)


class Mesh:
    """One rank's place among the `ranks` of its host (their numbers within the group), `place` being its own.

    Why data is visible after reading the counter
    ------------------------------------------------
    CPUs other than x86 let plain stores become visible in another order than they were made. So a rank never concludes
    from a plain load that another's data is there. The publisher writes its data and its record, and then adds to an
    eventfd; the reader takes the count out of it. The kernel does both under the spinlock of the eventfd. Leaving a
    spinlock is a release (all loads and stores before it are done), entering it an acquire (none after it has begun),
    and the reader entered after the writer left, since it saw the writer's addition. So what was written before `begun`
    is visible to the rank that sums; what it wrote before `finished` is visible to all; and its reads are over before
    an owner who has counted `finished` writes to its memory again.

    The counters that each rank also keeps in its control page, as plain words, are a hint only: they say when the
    system call is worth while. A late one delays no waiting rank, because waits block on the eventfds. An early one
    finds nothing in the eventfd, and nothing is concluded.
    """

    def __init__(self, ranks: Sequence[int], place: int, links: Sequence[PeerLink], page: ControlPage) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.place = place
        self.page = page
        self.links = tuple(links)  # in the order of ranks, this one left out
        self.begun = 0  # collectives that all the others have begun
        self.finished = 0
        self._sent = 0  # notices
        self._own_begun = 0
        self._own_finished = 0
        self._pid = os.getpid()
        self.closed = False
        self._unsent = False
        cores = len(os.sched_getaffinity(0))
        self._spin_s = SPIN_S if len(self.ranks) <= cores else 0.0

    def is_mine(self) -> bool:
        """False in a forked child: it has the descriptors, but its parent is the rank."""
        return os.getpid() == self._pid

    # Sending -------------------------------------------------------------------------------------------------------

    def begin(self, code: int, numel: int, arena: int, offset: int) -> None:
        """Publish the next collective of this rank."""
        self.page.write(self._own_begun, code, numel, arena, offset, self._sent)
        self._own_begun += 1
        self._signal(BEGUN)

    def finish(self) -> None:
        """Signal that this rank has done its part of the next collective."""
        self._own_finished += 1
        self._signal(FINISHED)

    def _signal(self, value: int) -> None:
        for link in self.links:
            os.eventfd_write(link.outbound.number, value)
        self.page.hint[0] = (self._own_begun & HALF) | (self._own_finished & HALF) << 32
        if not self.links:
            self._add_up()

    def share(self, arena: Arena) -> None:
        """Send an arena's descriptor to all peers; they have it before the next collective that is begun."""
        descriptor, arena.descriptor = arena.descriptor, None
        assert descriptor is not None
        self._send(arena_notice(arena.number, arena.bytes.numel(), descriptor))

    def take_back(self, number: int) -> None:
        """Let all peers forget an arena."""
        self._send(freed_notice(number))

    def _send(self, notice: Notice) -> None:
        self._sent += 1
        self._unsent = True
        for link in self.links:
            link.notices.queue(notice)

    def flush(self) -> bool:
        """Send queued notices, as far as the sockets take them. True when nothing is left."""
        if self._unsent:
            left = [link for link in self.links if not link.flush()]
            self._unsent = bool(left)
            self._add_up()
        return not self._unsent

    # Receiving ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Update what others have begun and finished, at no cost if nothing changed."""
        new = False
        for link in self.links:
            if link.hint[0] > link.seen and link.count():
                new = True
        if new:
            self._add_up()

    def calls(self, number: int) -> list[bytes]:
        """The calls of all ranks for a collective that all have begun, in rank order."""
        calls = []
        for link in self.links:
            if link.notices.received < link.page.notices(number):
                link.receive()
                self._add_up()  # it may have left
                if link.notices.received < link.page.notices(number):
                    raise RuntimeError(f"connection closed by rank {link.rank}, before it had shared its memory")
            calls.append(link.page.call(number))
        calls.insert(self.place, self.page.call(number))
        return calls

    def memory_of(self, place: int, arena: int) -> torch.Tensor:
        """An arena of another rank."""
        return self.links[place if place < self.place else place - 1].notices.arenas[arena]

    def sleep(self, awaited: Sequence[PeerLink], seconds: float) -> Events:
        """Block until one of `awaited` signals, any peer sends or hangs up, or the time is over. The events are
        to be handled. It changes nothing, so several threads may sleep.

        If every rank has a core it polls the hints briefly first: putting a core to sleep and waking it up
        takes several times as long as a small collective.
        """
        if self._spin_s:
            until = time.perf_counter() + min(seconds, self._spin_s)
            while time.perf_counter() < until:
                for link in awaited:
                    if link.hint[0] > link.seen:
                        return [(link, False)]
        poll = select.poll()
        numbers: dict[int, tuple[PeerLink, bool]] = {}
        for link in self.links:
            notices = link.notices
            if notices.gone is None:
                numbers[notices.connection.fileno()] = link, True
                poll.register(notices.connection, select.POLLIN | (select.POLLOUT if notices.unsent else 0))
        for link in awaited:
            numbers[link.inbound.number] = link, False
            poll.register(link.inbound.number, select.POLLIN)
        return [numbers[number] for number, _ in poll.poll(seconds * 1000)]

    def handle(self, events: Events) -> None:
        """Process the signals and notices of these peers."""
        for link, spoke in events:
            if spoke:
                link.receive()
            else:
                link.count()
        self._add_up()

    def _add_up(self) -> None:
        # A rank that is alone on its host does not wait there.
        self.begun = min((link.begun for link in self.links), default=self._own_begun)
        self.finished = min((link.finished for link in self.links), default=self._own_finished)

    # Leaving -------------------------------------------------------------------------------------------------------

    def leave(self, reason: PeerExit) -> None:
        """Disconnect from all peers, with a reason. Earlier signals still count on both sides."""
        if not self.is_mine():
            return
        for link in self.links:
            if link.notices.gone is None:
                link.notices.queue(exit_notice(reason))
                link.flush()
            with contextlib.suppress(OSError):  # it may have hung up first
                link.notices.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release every descriptor and every mapping of the others' memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.leave(PeerExit("it closed its transport"))
        for link in self.links:
            link.close()


def eventfd() -> Descriptor:
    return Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
