"""Carries connections of one machine's ranks to the store on another machine's loopback, through sealed connections.

torch's store trusts whoever reaches it. So it listens on the loopback of machine 0 only; on every other machine the
launcher listens on loopback in its place.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from paceline.launch.sealed import NotSealed, Sealed

CHUNK = 1 << 16
RETRY_S = 0.05
STORE_S = 60.0


class Tunnel:
    """The near end: a port on loopback; each connection to it gets a sealed one of its own."""

    def __init__(self, call: Callable[[], Sealed]) -> None:
        self._call = call
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._carry, args=(connection,), name="tunnel", daemon=True).start()

    def _carry(self, connection: socket.socket) -> None:
        with connection:
            try:
                sealed = self._call()
            except OSError:
                return  # the rank sees its connection end, and tries again or says so
            join(connection, sealed)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def serve_store(sealed: Sealed, port: Callable[[], int]) -> None:
    """The far end: connect to the store, which may not listen yet, and carry bytes both ways."""
    until = time.monotonic() + STORE_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port()), timeout=1.0)
            break
        except OSError:
            if time.monotonic() > until:
                sealed.close()
                return
            time.sleep(RETRY_S)
    with connection:
        connection.settimeout(None)
        join(connection, sealed)


def join(plain: socket.socket, sealed: Sealed) -> None:
    """Carry bytes both ways until both sides have ended."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sealed.wait_at_most(None)
    inward = threading.Thread(target=_inward, args=(plain, sealed), name="tunnel", daemon=True)
    inward.start()
    try:
        while data := plain.recv(CHUNK):
            sealed.send(data)
        sealed.end_sending()
    except OSError:
        sealed.close()
    inward.join()
    sealed.close()


def _inward(plain: socket.socket, sealed: Sealed) -> None:
    try:
        while data := sealed.receive():
            plain.sendall(data)
        plain.shutdown(socket.SHUT_WR)
    except (OSError, NotSealed):
        with contextlib.suppress(OSError):
            plain.shutdown(socket.SHUT_RDWR)
