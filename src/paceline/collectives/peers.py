"""What ranks tell each other about themselves: a record per rank on the group's store."""

import _thread
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    """One process, so that another process on the same host can tell whether it still lives."""

    host: str  # equal on two ranks exactly when they see the same process numbers
    hostname: str
    pid: int
    started: str  # kernel ticks since boot: a process number alone is soon used again

    @classmethod
    def own(cls) -> "Identity":
        hostname = socket.gethostname()
        boot, namespace = "", ""
        with contextlib.suppress(FileNotFoundError):  # not Linux: the host name must do
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
        pid = os.getpid()
        return cls(f"{boot} {hostname} {namespace}", hostname, pid, _stat(pid)[1])

    def state(self) -> str:
        """Of a process on this host: "alive", "stopped" or "dead"."""
        letter, started = _stat(self.pid)
        if letter in ("", "Z", "X") or started != self.started:
            return "dead"
        return "stopped" if letter in ("T", "t") else "alive"

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.hostname}"


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; the letter is empty if there is no such process."""
    if not Path("/proc/self").is_dir():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "", ""
        return "R", ""
    try:
        # The command comes second, in brackets, and may itself contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]


@dataclass(frozen=True)
class Wait:
    """What a rank waits in."""

    what: str
    since: float  # wall clock
    line: str  # which sequence of collectives `issued` and `recent` count
    issued: int
    recent: list[str]


@dataclass(frozen=True)
class Record:
    """All that a rank says about itself."""

    identity: Identity
    wait: Wait | None = None
    last: str = ""
    answers: bool = False  # it has noticed a failure, and lives
    blames: list[int] = field(default_factory=list)
    # A deadlock this rank has seen: the text, and since when each rank had waited. Those that still wait since then
    # raise it too, even if they look only after the first has left.
    verdict: tuple[str, list[float]] | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "Record":
        found = json.loads(text)
        found["identity"] = Identity(**found["identity"])
        found["wait"] = Wait(**found["wait"]) if found["wait"] else None
        found["verdict"] = tuple(found["verdict"]) if found["verdict"] else None
        return cls(**found)


class Board:
    """The records of all ranks. Its calls may block for as long as the store does: make them through `StoreCall`."""

    def __init__(self, store: Store, rank: int, size: int, own: Record) -> None:
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._unseen = [peer for peer in range(size) if peer != rank]
        self._seen: list[int] = []
        self._posted: Record | None = None
        self.own = own

    def post(self) -> None:
        with self._lock:
            if self.own is not self._posted:
                own = self.own
                self._store.set(self._key(self._rank), own.encode())
                self._posted = own

    def exchange(self) -> dict[int, Record]:
        """Post the own record if it changed, and read those of the peers that have one."""
        self.post()
        with self._lock:
            # `multi_get` would block on a key that is not there yet; once there, a record is never removed.
            if self._unseen and self._store.check([self._key(peer) for peer in self._unseen]):
                self._seen, self._unseen = sorted(self._seen + self._unseen), []
            for peer in list(self._unseen):
                if self._store.check([self._key(peer)]):
                    self._unseen.remove(peer)
                    self._seen.append(peer)
            if not self._seen:
                return {}
            found = self._store.multi_get([self._key(peer) for peer in self._seen])
            return {peer: Record.decode(text) for peer, text in zip(self._seen, found, strict=True)}

    def _key(self, rank: int) -> str:
        return f"paceline/rank/{rank}"


class StoreCall(Generic[T]):
    """A call to a store, on a thread of its own. It is a `Work`, so it can be waited for like any collective.

    Why a thread
    ------------
    A TCPStore answers from a thread of the process that hosts it, usually rank 0. If that process is stopped, even
    `check` blocks its caller for the store's whole timeout (five minutes), deaf to Ctrl-C. And `Store.wait` with a
    short timeout is no way out: TCPStore prints two warnings each time, FileStore sleeps a whole second.

    The thread is a bare one: `threading.Thread` and `Event` would cost 130 µs more in every checked collective.
    """

    def __init__(self, call: Callable[["StoreCall[T]"], T]) -> None:
        self._call = call
        self._result: T | None = None
        self._error: Exception | None = None
        self._over = False
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._stopping = False
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._result = self._call(self)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            self._over = True
            self._running.release()

    def done(self) -> bool:
        return self._over

    def wait(self, seconds: float) -> bool:
        if not self._join(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> T:
        assert self._over
        assert self._error is None
        return self._result  # type: ignore[return-value]

    def stop(self) -> None:
        """End the call, so far as it asks `pause`. Waits a moment: a thread that comes back from the store while
        the interpreter shuts down would abort the process."""
        self._stopping = True
        self._join(0.2)

    def pause(self, seconds: float) -> bool:
        """For the call itself: sleep, and say whether to go on."""
        time.sleep(seconds)
        return not self._stopping

    def _join(self, seconds: float) -> bool:
        if not self._over and self._running.acquire(timeout=seconds):
            self._running.release()
        return self._over
