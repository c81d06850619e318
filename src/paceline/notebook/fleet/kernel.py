"""The user's end of one rank: its channels, and what it does."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session

from paceline.notebook.events import Died

CHANNELS = {"shell": zmq.DEALER, "iopub": zmq.SUB, "stdin": zmq.DEALER, "control": zmq.DEALER}
PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
RECONNECT_MS = 20
WITHOUT_IDLE_S = 1.0
WITHOUT_REPLY_S = 0.3

Message = dict[str, Any]


class RankState(Enum):
    BOOTING = "booting"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank without asking it. `died` is empty while it lives, else e.g. "exited with 3"."""

    rank: int
    pid: int
    state: RankState
    device: str
    gpu_id: int | None
    python: str
    torch: str
    died: str


@dataclass(frozen=True)
class Answer:
    """What a rank answered. `error` is empty when it did as asked, else "NameError: ..."."""

    content: Mapping[str, Any]
    buffers: tuple[bytes, ...]

    @property
    def error(self) -> str:
        return str(self.content.get("error", ""))

    @classmethod
    def of(cls, message: Message) -> "Answer":
        return cls(message["content"], tuple(bytes(buffer) for buffer in message.get("buffers", ())))


@dataclass
class Cell:
    """The request that a rank is busy with, and what has come back of it."""

    message_id: str
    replied_at: float | None = None
    idle_at: float | None = None
    heard_at: float = 0.0  # the last output of the rank

    def is_over(self, now: float) -> bool:
        """Whether the rank has come to the end: it has replied, and has said on the way of its output that it is idle.

        A late interrupt may swallow one of the two. Output may be long on its way when the reply is there.
        """
        if self.idle_at is not None:
            return self.replied_at is not None or now - self.idle_at > WITHOUT_REPLY_S
        return self.replied_at is not None and now - max(self.replied_at, self.heard_at) > WITHOUT_IDLE_S


class Kernel:
    """One rank. Its sockets are files in the session's private folder, and every message is signed."""

    def __init__(self, rank: int, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.rank = rank
        self.pid = 0
        self.died: Died | None = None
        self.booted: Mapping[str, Any] = {}  # what it said of itself
        self.cell: Cell | None = None
        self.generation = 0
        self._context = context
        self._folder = folder
        self._session = Session()
        self._processes = 0
        self.sockets: dict[str, zmq.Socket[bytes]] = {}

    @property
    def state(self) -> RankState:
        if self.died is not None:
            return RankState.DEAD
        if not self.generation:
            return RankState.BOOTING
        return RankState.BUSY if self.cell is not None else RankState.IDLE

    def open(self) -> Path:
        """Prepare for a new process of this rank; return the file that tells it where to listen."""
        self.close()
        self.pid, self.died, self.booted, self.cell, self.generation = 0, None, {}, None, 0
        self._processes += 1
        address = self._folder / f"rank{self.rank}.{self._processes}"
        key = secrets.token_hex(32)
        file = address.with_suffix(address.suffix + ".json")
        told = {"transport": "ipc", "ip": str(address), "key": key, "signature_scheme": "hmac-sha256"}
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump({**told, **{f"{name}_port": port for name, port in PORTS.items()}}, out)
        self._session = Session(key=key.encode(), signature_scheme="hmac-sha256")
        for name, kind in CHANNELS.items():
            self.sockets[name] = self._connect(kind, f"ipc://{address}-{PORTS[name]}")
        return file

    def _connect(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)  # output is never dropped
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            # A rank asks for input on the stdin channel of the one whose cell it runs, by this name.
            socket.setsockopt(zmq.IDENTITY, self._session.bsession)
        socket.connect(address)
        return socket

    def send(
        self,
        channel: str,
        kind: str,
        content: Mapping[str, Any],
        *,
        buffers: Sequence[bytes] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Send a message; return the name under which the answer comes."""
        message = self._session.msg(kind, dict(content), metadata=dict(metadata or {}))
        self._session.send(self.sockets[channel], message, buffers=list(buffers))
        return str(message["header"]["msg_id"])

    def receive(self, channel: str, now: float) -> Message | None:
        """The next message that waits in a channel, if one does."""
        try:
            _, message = self._session.recv(self.sockets[channel], mode=zmq.NOBLOCK)
        except ValueError:  # not signed by the rank
            return None
        if message is not None:
            self._note(channel, message, now)
        return message

    def _note(self, channel: str, message: Message, now: float) -> None:
        if self.cell is None:
            return
        if channel == "iopub":
            self.cell.heard_at = now
        if message["parent_header"].get("msg_id") != self.cell.message_id:
            return
        if channel == "shell":
            self.cell.replied_at = now
        elif message["msg_type"] == "status" and message["content"].get("execution_state") == "idle":
            self.cell.idle_at = now

    def close(self) -> None:
        for socket in self.sockets.values():
            socket.close()
        self.sockets = {}
