"""Connections between launchers: who knows the secret gets in, and nothing else is believed."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import Job, nodes
from paceline.launch.sealed import HELLO, NONCE, NotSealed, Sealed, greet, introduce
from paceline.launch.tunnel import Tunnel, serve_store

SECRET = b"sixteen bytes or more"


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run two sides at once; an exception is a result."""
    results: list[Any] = [None, None]

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            results[index] = call()
        except (OSError, NotSealed) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index, call)) for index, call in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results[0], results[1]


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def closing(call: Callable[[], Any], connection: socket.socket) -> Callable[[], Any]:
    """As launchers do: whoever is refused hangs up."""

    def run() -> Any:
        try:
            return call()
        except (OSError, NotSealed):
            connection.close()
            raise

    return run


def test_both_sides_prove_themselves_and_talk() -> None:
    with pair() as (one, two):
        called, caller = both(lambda: greet(one, SECRET), lambda: introduce(two, SECRET))
        assert isinstance(called, Sealed)
        assert isinstance(caller, Sealed)
        caller.send_word(kind="join", node=1)
        caller.send(b"raw")
        assert called.receive_word() == {"kind": "join", "node": 1}
        assert called.receive() == b"raw"
        called.send(b"x" * 100_000)
        assert len(caller.receive()) == 100_000
        caller.close()
        assert called.receive() == b""


def test_another_secret_is_refused_on_both_sides() -> None:
    with pair() as (one, two):
        called, caller = both(
            closing(lambda: greet(one, SECRET), one),
            closing(lambda: introduce(two, b"another secret of this length"), two),
        )
    assert "does not know the secret" in str(called)
    assert isinstance(caller, NotSealed)
    assert "another secret" in str(caller)


def test_a_launcher_that_does_not_know_the_secret_is_not_believed() -> None:
    with pair() as (one, two):

        def impostor() -> None:
            one.sendall(HELLO + bytes(NONCE))
            one.recv(64)
            one.sendall(bytes(32))

        _, caller = both(impostor, lambda: introduce(two, SECRET))
    assert isinstance(caller, NotSealed)


def test_an_answer_cannot_be_sent_back() -> None:
    """A stranger that returns what it was sent does not get in."""
    with pair() as (one, two):

        def mirror() -> None:
            hello = two.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)
            two.sendall(hello[len(HELLO) :] + hello[-32:])

        called, _ = both(lambda: greet(one, SECRET), mirror)
    assert isinstance(called, NotSealed)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64])
def test_garbage_is_refused(data: bytes) -> None:
    with pair() as (one, two):

        def stranger() -> None:
            two.sendall(data)
            two.shutdown(socket.SHUT_WR)

        called, _ = both(lambda: greet(one, SECRET), stranger)
    assert isinstance(called, NotSealed)


@pytest.mark.parametrize("where", [0, 4, 40, -1])
def test_a_changed_frame_is_not_believed(where: int) -> None:
    with pair() as (one, two), pair() as (near, far):
        called, caller = both(lambda: greet(one, SECRET), lambda: introduce(two, SECRET))
        caller._connection, called._connection = near, far
        caller.send(b"a word of some length")
        frame = bytearray(far.recv(4096))
        frame[where] ^= 1
        near.sendall(frame)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(NotSealed):
            called.receive()


def test_a_repeated_frame_is_not_believed() -> None:
    with pair() as (one, two), pair() as (near, far):
        called, caller = both(lambda: greet(one, SECRET), lambda: introduce(two, SECRET))
        caller._connection, called._connection = near, far
        caller.send(b"pay once")
        frame = far.recv(4096)
        near.sendall(frame * 2)
        assert called.receive() == b"pay once"
        with pytest.raises(NotSealed):
            called.receive()


def test_a_tunnel_carries_a_connection_and_both_its_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as door:

        def call() -> Sealed:
            return introduce(socket.create_connection(door.getsockname()), SECRET)

        def keep_door() -> None:
            sealed = greet(door.accept()[0], SECRET)
            serve_store(sealed, lambda: int(store.getsockname()[1]))

        keeper = threading.Thread(target=keep_door)
        keeper.start()
        tunnel = Tunnel(call)
        try:
            with socket.create_connection(("127.0.0.1", tunnel.port)) as rank:
                served, _ = store.accept()
                with served:
                    rank.sendall(b"question" * 20_000)
                    rank.shutdown(socket.SHUT_WR)
                    asked = b""
                    while data := served.recv(1 << 16):
                        asked += data
                    assert asked == b"question" * 20_000
                    served.sendall(b"answer")
                    served.shutdown(socket.SHUT_WR)
                    assert rank.recv(100, socket.MSG_WAITALL) == b"answer"
        finally:
            tunnel.close()
            keeper.join(10)
            for thread in threading.enumerate():
                if thread.name == "tunnel":
                    thread.join(10)
    assert not keeper.is_alive()


def test_of_two_machines_with_one_number_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # a job of several machines would not listen there
    monkeypatch.setattr(nodes, "_listen", lambda _: listener)
    place: dict[str, Any] = {"nodes": 2, "master_addr": "10.0.0.1", "master_port": 1, "secret": SECRET}
    notes: list[str] = []
    head = nodes.Head(Job(command=("x",), ranks=3, run_dir=tmp_path, **place), notes.append)
    callers = []
    try:
        for ranks in (2, 2, 0):
            callers.append(introduce(socket.create_connection(listener.getsockname()), SECRET))
            callers[-1].send_word(want="join", node=1, nodes=2, ranks=ranks)
        seat = head.begin(0, lambda: None)
        until = time.monotonic() + 10
        while len(notes) < 2 and time.monotonic() < until:
            head.stop_asked()
            time.sleep(0.01)
        words = [next(word for word in iter(caller.receive_word, None) if word["kind"] != "beat") for caller in callers]
    finally:
        head.close()
        for caller in callers:
            caller.close()
    assert seat.world_size == 5
    assert sorted(word["kind"] for word in words) == ["refused", "refused", "start"]
    assert sorted(notes) == [
        "refused a machine: it says it is machine 1 with 0 ranks",
        "refused a machine: machine 1 is here already",
    ]
