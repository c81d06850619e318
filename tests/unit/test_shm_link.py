"""What a link knows of a peer that has left: all that it had signalled, however its leaving is learned."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline.collectives.shm import memory
from paceline.collectives.shm.link import BEGUN, FINISHED, Farewell, Link, Notice
from paceline.collectives.shm.memory import Descriptor
from paceline.collectives.shm.mesh import Mesh, eventfd
from paceline.collectives.shm.record import NBYTES, ControlPage


@dataclass
class Pair:
    """Rank 0's link to rank 1, and rank 1's to rank 0."""

    own: Link
    peer: Link
    mesh: Mesh


@pytest.fixture
def pair() -> Iterator[Pair]:
    lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pages = [ControlPage(memory.create(NBYTES, "a page")) for _ in lines]
    to_own, to_peer = eventfd(), eventfd()
    peer = Link(0, lines[1], twin(to_peer), twin(to_own), pages[0])
    own = Link(1, lines[0], to_own, to_peer, pages[1])
    yield Pair(own, peer, Mesh([0, 1], 0, [own], pages[0]))
    own.close()
    peer.close()


def twin(descriptor: Descriptor) -> Descriptor:
    return Descriptor(os.dup(descriptor.number))


def hang_up(pair: Pair) -> None:
    pair.peer.connection.close()


def say_farewell(pair: Pair) -> None:
    pair.peer.queue(Notice.of_farewell(Farewell("it was told to")))
    assert pair.peer.flush()
    hang_up(pair)


@pytest.mark.parametrize("leave", [hang_up, say_farewell])
@pytest.mark.parametrize("learn", ["receive", "flush"])
def test_what_a_peer_signalled_before_it_left_counts(pair: Pair, leave: object, learn: str) -> None:
    assert callable(leave)
    pair.peer.signal(BEGUN)
    pair.peer.signal(FINISHED)
    pair.peer.signal(BEGUN)
    leave(pair)
    assert (pair.own.begun, pair.own.finished) == (0, 0)
    if learn == "receive":
        pair.own.receive()
    else:
        pair.own.queue(Notice.of_freed(3))
        pair.own.flush()
    assert pair.own.gone is not None
    assert (pair.own.begun, pair.own.finished) == (2, 1)


def test_the_mesh_knows_what_the_link_has_counted(pair: Pair) -> None:
    pair.peer.signal(BEGUN)
    say_farewell(pair)
    pair.mesh.heed([(pair.own, True)])
    assert pair.own.gone == Farewell("it was told to")
    assert pair.mesh.begun == 1


def test_a_link_that_is_closed_reads_no_counter(pair: Pair) -> None:
    """A child that was forked off closes its copy; what it read would be lost for the parent."""
    with_parent = twin(pair.own.inbound)
    pair.peer.signal(BEGUN)
    pair.own.close()
    assert os.eventfd_read(with_parent.number) == BEGUN
