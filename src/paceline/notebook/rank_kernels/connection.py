"""The user's end of one rank: its channels, its raw output and its state; and the private folder of a session."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import zmq
from jupyter_client.client import KernelClient
from jupyter_client.session import Session

from paceline.errors import UsageError
from paceline.notebook.events import Died
from paceline.notebook.rank_kernels.raw_output import RawOutput

CHANNELS = ("iopub", "shell", "stdin", "control")
RECONNECT_MS = 20
WITHOUT_IDLE_S = 1.0
WITHOUT_REPLY_S = 0.3
PREFIX = "paceline-notebook-"
LONGEST = 60  # the path of a socket has at most 107 bytes

Message = dict[str, Any]
Socket: TypeAlias = "zmq.Socket[bytes]"


class RankState(Enum):
    """The states of a rank, in this order."""

    STARTING = "starting Python"
    LOADING = "loading torch"
    JOINING = "joining the group"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


@dataclass(frozen=True)
class RankFacts:
    """What is known about a rank without asking it. `died` is empty while it lives, else e.g. "exited with 3"."""

    rank: int
    pid: int
    state: RankState
    device: str
    gpu_id: int | None
    python: str
    torch: str
    died: str


@dataclass(frozen=True)
class RankReply:
    """What a rank replied. `error` is empty when it did as asked, else "NameError: ..."."""

    content: Mapping[str, Any]
    buffers: tuple[bytes, ...]

    @property
    def error(self) -> str:
        return str(self.content.get("error", ""))


@dataclass
class CellRequest:
    """The cell that a rank runs, and the replies received so far."""

    message_id: str
    replied_at: float | None = None
    idle_at: float | None = None
    received_at: float = 0.0  # the last output of the rank

    def is_over(self, now: float) -> bool:
        """Whether the rank has finished: it has replied, and has said, after its output, that it is idle.

        A late interrupt may swallow one of the two. Output may still be on its way when the reply is there.
        """
        if self.idle_at is not None:
            return self.replied_at is not None or now - self.idle_at > WITHOUT_REPLY_S
        return self.replied_at is not None and now - max(self.replied_at, self.received_at) > WITHOUT_IDLE_S


def is_message(message: Mapping[str, Any]) -> bool:
    """Whether a message has the parts that the protocol gives to each."""
    tables = all(isinstance(message.get(part), dict) for part in ("header", "parent_header", "metadata", "content"))
    return tables and isinstance(message.get("msg_type"), str)


def new_context() -> "zmq.Context[Socket]":
    """The context of the sockets of all ranks."""
    context: zmq.Context[Socket] = zmq.Context()
    context.setsockopt(zmq.RCVHWM, 0)  # output is never dropped
    context.setsockopt(zmq.SNDHWM, 0)
    context.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    return context


class KernelConnection:
    """One rank. Its sockets are files in the session's private folder, and every message is signed."""

    def __init__(
        self, rank: int, folder: Path, context: "zmq.Context[Socket]", *, device: str, gpu_id: int | None
    ) -> None:
        self.rank = rank
        self.out, self.err = RawOutput(f"paceline-rank-{rank}-out"), RawOutput(f"paceline-rank-{rank}-err")
        self.pid = 0
        self.died: Died | None = None
        self.reported: Mapping[str, Any] = {}  # what it reported of itself when it started
        self.cell: CellRequest | None = None
        self.stage = RankState.STARTING  # up to IDLE
        self.sockets: dict[str, Socket] = {}
        self._device, self._gpu_id = device, gpu_id
        self._context = context
        self._folder = folder
        self._session = Session()
        self._processes = 0

    @property
    def state(self) -> RankState:
        if self.died is not None:
            return RankState.DEAD
        return RankState.BUSY if self.cell is not None else self.stage

    def facts(self) -> RankFacts:
        """What is known of it without asking it."""
        return RankFacts(
            rank=self.rank,
            pid=self.pid,
            state=self.state,
            device=self._device,
            gpu_id=self._gpu_id,
            python=self.reported.get("python", ""),
            torch=self.reported.get("torch", ""),
            died="" if self.died is None else self.died.how,
        )

    def open(self) -> Path:
        """Prepare for a new process of this rank; return the connection file that tells it where to listen."""
        self.disconnect()
        self.pid, self.died, self.reported, self.cell, self.stage = 0, None, {}, None, RankState.STARTING
        self._processes += 1
        address = self._folder / f"rank{self.rank}.{self._processes}"
        file = address.with_suffix(address.suffix + ".json")
        self._session = Session(key=secrets.token_hex(32).encode(), signature_scheme="hmac-sha256")
        client = KernelClient(
            transport="ipc", ip=str(address), connection_file=str(file), session=self._session, context=self._context
        )
        client.write_connection_file()
        # A rank asks for input on the stdin channel of the client whose cell it runs, which it identifies by this.
        identity = self._session.bsession
        self.sockets = {
            "iopub": client.connect_iopub(),
            "shell": client.connect_shell(identity),
            "stdin": client.connect_stdin(identity),
            "control": client.connect_control(identity),
        }
        return file

    def send(
        self,
        channel: str,
        kind: str,
        content: Mapping[str, Any],
        *,
        buffers: Sequence[bytes] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Send a message; return its id, which the reply names as its parent."""
        message = self._session.msg(kind, dict(content), metadata=dict(metadata or {}))
        self._session.send(self.sockets[channel], message, buffers=list(buffers))
        return str(message["header"]["msg_id"])

    def receive(self, channel: str, now: float) -> Message | None:
        """The next message that waits in a channel, if there is one."""
        try:
            _, message = self._session.recv(self.sockets[channel], mode=zmq.NOBLOCK)
        except (ValueError, TypeError, LookupError):  # not signed by the rank, or not a message
            return None
        if message is None or not is_message(message):  # user code may send anything
            return None
        if self.cell is not None:
            self._note(self.cell, channel, message, now)
        return message

    def _note(self, cell: CellRequest, channel: str, message: Message, now: float) -> None:
        if channel == "iopub":
            cell.received_at = now
        if message["parent_header"].get("msg_id") != cell.message_id:
            return
        if channel == "shell":
            cell.replied_at = now
        elif message["msg_type"] == "status" and message["content"].get("execution_state") == "idle":
            cell.idle_at = now

    def mark_start(self) -> None:
        """A new process or cell starts: output so far does not count as its last lines."""
        self.out.mark_start()
        self.err.mark_start()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its standard error, or of its standard output if it wrote nothing there."""
        err, out = self.err.last_lines(), self.out.last_lines()
        return err or out

    def disconnect(self) -> None:
        for socket in self.sockets.values():
            socket.close(linger=0)
        self.sockets = {}

    def close(self) -> None:
        self.disconnect()
        self.out.close()
        self.err.close()


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read. It is removed at the end of the block.

    Its owner holds a lock. A process that was killed cannot remove its folder; the next one does, since nobody holds
    the lock any more.
    """
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # it lists all folders that it has tried
        raise no_room("any folder for temporary files", error) from error
    base = base if len(str(base)) < LONGEST else Path("/tmp")
    _remove_abandoned(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(folder / "lock.new", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock.new").rename(folder / "lock")  # it is not visible before it is locked
    except OSError as error:
        raise no_room(base, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def no_room(folder: Path | str, error: OSError) -> UsageError:
    """The error for a disk that is full or cannot be written."""
    return UsageError(
        f"cannot create the sockets of the ranks in {folder}: {error.strerror or error}; free some space there, or set "
        f"TMPDIR to a folder that can be written"
    )


def _remove_abandoned(base: Path) -> None:
    for left in base.glob(f"{PREFIX}*"):
        try:
            # Non-blocking, and not following links: another user may have created a file of that name.
            lock = os.open(left / "lock", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:  # not created yet, removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(lock)
