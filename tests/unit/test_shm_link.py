"""What a link knows of a peer that has left: all that it had signalled, however its leaving is learned."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline.collectives.shm import memfd
from paceline.collectives.shm.memfd import Descriptor
from paceline.collectives.shm.mesh import BEGUN, FINISHED, PAGE_BYTES, ControlPage, Mesh, PeerLink, eventfd
from paceline.collectives.shm.notices import PeerExit, exit_notice, freed_notice


@dataclass
class Pair:
    """Rank 0's link to rank 1, and rank 1's to rank 0."""

    own: PeerLink
    peer: PeerLink
    mesh: Mesh


@pytest.fixture
def pair() -> Iterator[Pair]:
    lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pages = [ControlPage(memfd.create(PAGE_BYTES, "a page")) for _ in lines]
    to_own, to_peer = eventfd(), eventfd()
    peer = PeerLink(0, lines[1], twin(to_peer), twin(to_own), pages[0])
    own = PeerLink(1, lines[0], to_own, to_peer, pages[1])
    yield Pair(own, peer, Mesh([0, 1], 0, [own], pages[0]))
    own.close()
    peer.close()


def twin(descriptor: Descriptor) -> Descriptor:
    return Descriptor(os.dup(descriptor.number))


def signal(pair: Pair, value: int) -> None:
    os.eventfd_write(pair.peer.outbound.number, value)


def hang_up(pair: Pair) -> None:
    pair.peer.notices.connection.close()


def say_why(pair: Pair) -> None:
    pair.peer.notices.queue(exit_notice(PeerExit("it was told to")))
    assert pair.peer.flush()
    hang_up(pair)


@pytest.mark.parametrize("leave", [hang_up, say_why])
@pytest.mark.parametrize("learn", ["receive", "flush"])
def test_what_a_peer_signalled_before_it_left_counts(pair: Pair, leave: object, learn: str) -> None:
    assert callable(leave)
    signal(pair, BEGUN)
    signal(pair, FINISHED)
    signal(pair, BEGUN)
    leave(pair)
    assert (pair.own.begun, pair.own.finished) == (0, 0)
    if learn == "receive":
        pair.own.receive()
    else:
        pair.own.notices.queue(freed_notice(3))
        pair.own.flush()
    assert pair.own.notices.gone is not None
    assert (pair.own.begun, pair.own.finished) == (2, 1)


def test_the_mesh_knows_what_the_link_has_counted(pair: Pair) -> None:
    signal(pair, BEGUN)
    say_why(pair)
    pair.mesh.handle([(pair.own, True)])
    assert pair.own.notices.gone == PeerExit("it was told to")
    assert pair.mesh.begun == 1


def test_a_link_that_is_closed_reads_no_counter(pair: Pair) -> None:
    """A child that was forked off closes its copy; what it read would be lost for the parent."""
    with_parent = twin(pair.own.inbound)
    signal(pair, BEGUN)
    pair.own.close()
    assert os.eventfd_read(with_parent.number) == BEGUN
