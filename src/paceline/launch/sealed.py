"""A connection between two launchers that share a secret.

Each side proves that it knows the secret by a challenge of the other (HMAC-SHA256 over fresh random numbers of both)
before anything else is read. After that every frame carries a code over its direction, its number and its bytes, so
nothing can be put in, left out, repeated or changed on the way. It is not encrypted: whoever can listen can read.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from typing import Any

from paceline.errors import PacelineError

HELLO = b"paceline launcher 1\n"
NONCE = 32
CODE = 32
MAX_FRAME = 1 << 20
GREET_S = 5.0
_LENGTH = struct.Struct("!I")


class NotSealed(PacelineError, ConnectionError):
    """The other side does not know the secret, does not speak this protocol, or sent something it did not seal."""


class Sealed:
    """A connection whose other side has proven that it knows the secret. Several threads may send."""

    def __init__(self, connection: socket.socket, key: bytes, own: bytes, peer: bytes) -> None:
        self._connection = connection
        self._key = key
        self._own, self._peer = own, peer
        self._sent = self._received = 0
        self._sending = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames are small, and waited for

    def send(self, data: bytes) -> None:
        """Send one frame."""
        with self._sending:
            code = self._code(self._own, self._sent, data)
            self._sent += 1
            self._connection.sendall(_LENGTH.pack(len(data)) + code + data)

    def receive(self) -> bytes:
        """The next frame; empty when the other side has closed."""
        head = _exactly(self._connection, _LENGTH.size, or_end=True)
        if not head:
            return b""
        (length,) = _LENGTH.unpack(head)
        if not 0 < length <= MAX_FRAME:
            raise NotSealed(f"a frame says it has {length} bytes: expected 1 to {MAX_FRAME}")
        code, data = _exactly(self._connection, CODE), _exactly(self._connection, length)
        if not hmac.compare_digest(code, self._code(self._peer, self._received, data)):
            raise NotSealed("a frame was changed on its way, or somebody else sent it")
        self._received += 1
        return data

    def send_word(self, **word: object) -> None:
        """Send a small JSON object."""
        self.send(json.dumps(word).encode())

    def receive_word(self) -> dict[str, Any] | None:
        """The next JSON object; None when the other side has closed."""
        data = self.receive()
        if not data:
            return None
        word = json.loads(data)
        if not isinstance(word, dict):
            raise NotSealed(f"expected a JSON object, got {type(word).__name__}")
        return word

    def wait_at_most(self, seconds: float | None) -> None:
        """How long `receive` may wait."""
        self._connection.settimeout(seconds)

    def local_address(self) -> str:
        """This machine's address on the way to the other."""
        return str(self._connection.getsockname()[0])

    def end_sending(self) -> None:
        """Nothing more will be sent; the other side sees the end."""
        self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        # A thread that reads from it is woken by this, and not by closing alone.
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was faster
        finally:
            self._connection.close()

    def _code(self, sender: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, sender + number.to_bytes(8, "big") + data, "sha256")


def greet(connection: socket.socket, secret: bytes) -> Sealed:
    """The side that was called. Nothing but one answer of fixed length is read before the other side is known."""
    connection.settimeout(GREET_S)
    own = secrets.token_bytes(NONCE)
    connection.sendall(HELLO + own)
    answer = _exactly(connection, NONCE + CODE, within_s=GREET_S)
    theirs, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"caller", own, theirs)):
        raise NotSealed("the caller does not know the secret of this job")
    connection.sendall(_proof(secret, b"called", own, theirs))
    return Sealed(connection, _proof(secret, b"frames", own, theirs), b"called", b"caller")


def introduce(connection: socket.socket, secret: bytes) -> Sealed:
    """The side that calls."""
    connection.settimeout(GREET_S)
    hello = _exactly(connection, len(HELLO) + NONCE)
    if not hello.startswith(HELLO):
        raise NotSealed("what listens there is no paceline launcher of this version")
    theirs, own = hello[len(HELLO) :], secrets.token_bytes(NONCE)
    connection.sendall(own + _proof(secret, b"caller", theirs, own))
    proof = _exactly(connection, CODE, or_end=True)
    if not hmac.compare_digest(proof, _proof(secret, b"called", theirs, own)):
        raise NotSealed("the launcher there has another secret")
    return Sealed(connection, _proof(secret, b"frames", theirs, own), b"caller", b"called")


def _proof(secret: bytes, purpose: bytes, called: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret, HELLO + purpose + called + caller, "sha256")


def _exactly(connection: socket.socket, count: int, *, or_end: bool = False, within_s: float | None = None) -> bytes:
    """So many bytes; with `within_s`, in that time all together, however slowly they drip in."""
    data = b""
    until = None if within_s is None else time.monotonic() + within_s
    while len(data) < count:
        if until is not None:
            connection.settimeout(max(0.01, until - time.monotonic()))
        more = connection.recv(count - len(data))
        if not more:
            if or_end and not data:
                return b""
            raise NotSealed("the connection ended in the middle of something")
        data += more
    return data
