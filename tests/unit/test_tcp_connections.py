"""Connections of this process are cut by the port of a neighbour, or by the address of another machine."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from paceline.tcp_connections import local_ports, sever_connections

Link = tuple[socket.socket, socket.socket]


@pytest.fixture
def links() -> Iterator[dict[str, Link]]:
    """A connection to a listener at each of two addresses, both ends."""
    with ExitStack() as undo:
        found = {}
        for address in ("127.0.0.1", "127.0.0.9"):
            listener = undo.enter_context(socket.create_server((address, 0)))
            ours = undo.enter_context(socket.create_connection(listener.getsockname()))
            theirs = undo.enter_context(listener.accept()[0])
            found[address] = ours, theirs
        yield found


def is_open(link: Link) -> bool:
    ours, theirs = link
    try:
        theirs.send(b"x")
        return ours.recv(1) == b"x"
    except OSError:
        return False


def test_those_to_another_machine(links: dict[str, Link]) -> None:
    assert sever_connections((), {"127.0.0.9"}) == 1
    assert not is_open(links["127.0.0.9"])
    assert is_open(links["127.0.0.1"])


def test_those_to_a_port_of_this_machine(links: dict[str, Link]) -> None:
    port = links["127.0.0.1"][1].getsockname()[1]
    assert port in local_ports()
    assert sever_connections({port}) == 1
    assert not is_open(links["127.0.0.1"])
    assert is_open(links["127.0.0.9"])


def test_none_without_a_peer(links: dict[str, Link]) -> None:
    assert sever_connections(()) == 0
    assert all(is_open(link) for link in links.values())
