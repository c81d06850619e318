"""JSON lines over a Unix socket, between the conductor and its workers."""

import json
import os
import select
import socket
import threading
import time
from typing import Any


class HungUp(ConnectionError):
    """The other side is gone."""


class Line:
    """One end of a connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise HungUp(f"could not send: {error}") from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises `HungUp` when there will be none, TimeoutError when it does not come in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                raise TimeoutError(f"nothing came within {timeout_s} s")
            try:
                data = self._connection.recv(1 << 16)
            except OSError as error:
                raise HungUp(f"could not receive: {error}") from error
            if not data:
                raise HungUp("the other side has closed the connection")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        message = json.loads(line)
        assert isinstance(message, dict), "both ends are ours"
        return message

    def has_more(self) -> bool:
        """Whether a whole message has been read from the socket already."""
        return b"\n" in self._pending

    def close(self) -> None:
        self._connection.close()


def exit_when_closed(connection: socket.socket) -> None:
    """End this process as soon as the other side of `connection` is gone, whatever it is doing.

    The kernel closes the conductor's sockets however it ends, so no worker outlives it.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="conductor-watch", daemon=True).start()
