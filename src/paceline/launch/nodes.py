"""What launchers of several machines agree on: when to start, that something failed, whether to start again."""

import contextlib
import fcntl
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from paceline.errors import PacelineError, UsageError
from paceline.launch.job import Failure, Job, LaunchError
from paceline.launch.sealed import NotSealed, Sealed, greet, introduce
from paceline.launch.seat import LOOPBACK, Seat, reserve_port
from paceline.launch.tunnel import Tunnel, serve_store
from paceline.world.environment import is_loopback

BEAT_S = 1.0
LOST_S = 8.0
SLICE_S = 0.1
RETRY_S = 0.2
MAX_STRANGERS = 64
# What launchers tell each other, beside the beat. The other words in an inbox are this launcher's own.
TOLD = ("start", "stop", "verdict", "refused", "failed", "ended")
_SIOCGIFADDR = 0x8915

Patience = Callable[[], None]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """What all machines do after an attempt."""

    failure: Failure | None
    again: bool


class Nodes(Protocol):
    """This machine among all. Between `begin` and `settle` it is an attempt's `Remote`."""

    def begin(self, attempt: int, patience: Patience) -> Seat:
        """Wait until all machines are there. `patience` is called meanwhile and may raise."""

    def stop_asked(self) -> bool:
        """Whether this machine's ranks are to end because of another machine."""

    def failed(self, failure: Failure) -> None:
        """Tell the others at once."""

    def settle(self, failure: Failure | None, again: bool, patience: Patience) -> Verdict:
        """Wait until the ranks of all machines have ended, and agree on why and on what is next."""

    def close(self) -> None: ...


class Alone:
    """One machine: it always agrees with itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._port: socket.socket | None = None

    def begin(self, attempt: int, patience: Patience) -> Seat:
        self.close()
        # A restart takes another port: somebody may still be connected to the old one.
        self._port = reserve_port(0 if attempt else self._job.master_port)
        port = self._port.getsockname()[1]
        return Seat(0, self._job.ranks, LOOPBACK, port, "lo", attempt, self._job.run_id)

    def stop_asked(self) -> bool:
        return False

    def failed(self, failure: Failure) -> None:
        """There is nobody to tell."""

    def settle(self, failure: Failure | None, again: bool, patience: Patience) -> Verdict:
        return Verdict(failure, again and failure is not None)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


class _Link:
    """A sealed connection to another launcher, with a reading thread and a beat."""

    def __init__(self, node: int, sealed: Sealed, inbox: "queue.Queue[tuple[int, dict[str, Any]]]") -> None:
        self.node = node
        self._sealed = sealed
        self._inbox = inbox
        self._over = threading.Event()
        sealed.wait_at_most(LOST_S)
        threading.Thread(target=self._beat, name=f"beat {node}", daemon=True).start()

    def read(self) -> None:
        """Put what comes into the inbox, and at last that nothing more will come."""
        reason = "its launcher closed the connection"
        try:
            while (word := self._sealed.receive_word()) is not None:
                if word.get("kind") in TOLD:
                    self._inbox.put((self.node, word))
        except TimeoutError:
            reason = f"its launcher said nothing for {LOST_S:.0f} s"
        except (OSError, PacelineError, ValueError) as error:
            reason = str(error)
        self._over.set()
        self._inbox.put((self.node, {"kind": "lost", "reason": reason}))

    def say(self, **word: object) -> None:
        with contextlib.suppress(OSError):  # a lost machine is reported by the reading thread
            self._sealed.send_word(**word)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self.say(kind="beat")

    def close(self) -> None:
        self._over.set()
        self._sealed.close()


class Head:
    """The launcher of machine 0. The others come to it, and it decides."""

    def __init__(self, job: Job, note: Note) -> None:
        self._job, self._note = job, note
        self._inbox: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._links: dict[int, _Link] = {}
        self._sizes = {0: job.ranks}
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._store: socket.socket | None = None
        self._store_port = 0
        self._failures: list[Failure] = []
        self._ended: dict[int, bool] = {}
        self._lost = False
        self._listener = _listen(job)
        self._interface = interface_of(self._listener.getsockname()[0])
        threading.Thread(target=self._accept, name="head", daemon=True).start()

    # Those who come ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._receive, args=(connection, address[0]), name="caller", daemon=True).start()

    def _receive(self, connection: socket.socket, address: str) -> None:
        with contextlib.ExitStack() as stranger:
            stranger.callback(self._strangers.release)
            try:
                sealed = greet(connection, self._job.secret)
                word = sealed.receive_word() or {}
            except (OSError, PacelineError, ValueError) as error:
                connection.close()
                self._inbox.put((-1, {"kind": "note", "text": f"refused a connection from {address}: {error}"}))
                return
        if word.get("want") == "store":
            serve_store(sealed, lambda: self._store_port)
        elif word.get("want") == "join" and isinstance(word.get("node"), int):
            asked = {"ranks": word.get("ranks"), "nodes": word.get("nodes"), "sealed": sealed}
            self._inbox.put((word["node"], {"kind": "join", **asked}))
        else:
            sealed.close()

    def _welcome(self, node: int, ranks: object, nodes: object, sealed: Sealed) -> None:
        """A machine wants to join. Only the thread that supervises decides, so two cannot take one place."""
        refusal = ""
        if nodes != self._job.nodes:
            refusal = f"it counts {nodes} machines, machine 0 counts {self._job.nodes}"
        elif not 0 < node < self._job.nodes or not isinstance(ranks, int) or ranks < 1:
            refusal = f"it says it is machine {node} with {ranks} ranks"
        elif node in self._links:
            refusal = f"machine {node} is here already"
        if refusal or not isinstance(ranks, int):
            with contextlib.suppress(OSError):  # it has gone already
                sealed.send_word(kind="refused", reason=refusal)
            sealed.close()
            self._note(f"refused a machine: {refusal}")
            return
        link = _Link(node, sealed, self._inbox)
        self._sizes[node], self._links[node] = ranks, link
        threading.Thread(target=link.read, name=f"machine {node}", daemon=True).start()

    # What an attempt needs -----------------------------------------------------------------------------------------

    def begin(self, attempt: int, patience: Patience) -> Seat:
        deadline = time.monotonic() + self._job.join_timeout_s
        told_at = time.monotonic() + 5.0
        while len(self._links) < self._job.nodes - 1:
            patience()
            self._hear(SLICE_S)
            now = time.monotonic()
            missing = [node for node in range(1, self._job.nodes) if node not in self._links]
            names = f"machine{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if missing and now > deadline:
                raise LaunchError(f"{names} did not come within {self._job.join_timeout_s:.0f} s")
            if missing and now > told_at:
                told_at = now + 30.0
                self._note(f"waiting for {names} at {self._job.master_addr}:{self._job.master_port}")
        self._failures, self._ended = [], {}
        self._keep_port()
        first, seats = 0, {}
        for node in range(self._job.nodes):
            seats[node] = first
            first += self._sizes[node]
        for node, link in self._links.items():
            link.say(kind="start", attempt=attempt, first_rank=seats[node], world_size=first, run_id=self._job.run_id)
        return Seat(0, first, LOOPBACK, self._store_port, self._interface, attempt, self._job.run_id)

    def _keep_port(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = reserve_port()
        self._store_port = self._store.getsockname()[1]

    def stop_asked(self) -> bool:
        self._hear(0.0)
        return bool(self._failures)

    def failed(self, failure: Failure) -> None:
        self._failures.append(failure)
        for link in self._links.values():
            link.say(kind="stop", failure=asdict(failure))

    def settle(self, failure: Failure | None, again: bool, patience: Patience) -> Verdict:
        if failure is not None and failure not in self._failures:
            self.failed(failure)
        while len(self._ended) < self._job.nodes - 1:
            patience()
            self._hear(SLICE_S)
        first = best(self._failures)
        verdict = Verdict(first, again and first is not None and not self._lost and all(self._ended.values()))
        for link in self._links.values():
            link.say(kind="verdict", failure=None if first is None else asdict(first), again=verdict.again)
        return verdict

    def _hear(self, seconds: float) -> None:
        """Take in all that has come, waiting `seconds` for the first of it."""
        while True:
            try:
                node, word = self._inbox.get(seconds > 0, seconds or None)
            except queue.Empty:
                return
            seconds = 0.0
            kind = word.get("kind")
            if kind == "note":
                self._note(word["text"])
            elif kind == "join":
                self._welcome(node, word["ranks"], word["nodes"], word["sealed"])
            elif kind == "failed":
                self.failed(failure_from(word["failure"]))
            elif kind == "ended":
                self._ended[node] = bool(word.get("again"))
                if word.get("failure"):
                    found = failure_from(word["failure"])
                    if found not in self._failures:
                        self.failed(found)
            elif kind == "lost":
                self._lose(node, word["reason"])

    def _lose(self, node: int, reason: str) -> None:
        self._links.pop(node).close()
        if node not in self._ended:
            self._lost, self._ended[node] = True, False
            self.failed(Failure((), "node", 1, f"machine {node} was lost: {reason}"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self._links.values()):
            link.close()
        if self._store is not None:
            self._store.close()


class Member:
    """The launcher of any other machine."""

    def __init__(self, job: Job, note: Note) -> None:
        self._job, self._note = job, note
        self._inbox: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._link: _Link | None = None
        self._tunnel = Tunnel(self._call_store)
        self._interface = ""
        self._stop: Failure | None = None
        self._lost = ""

    def _call(self) -> Sealed:
        connection = socket.create_connection((self._job.master_addr, self._job.master_port), timeout=5.0)
        try:
            return introduce(connection, self._job.secret)
        except BaseException:
            connection.close()
            raise

    def _call_store(self) -> Sealed:
        sealed = self._call()
        sealed.send_word(want="store")
        return sealed

    def begin(self, attempt: int, patience: Patience) -> Seat:
        if self._link is None:
            self._link = self._join(patience)
        self._stop = None
        word = self._await("start", patience)
        port = self._tunnel.port
        first, size, run_id = int(word["first_rank"]), int(word["world_size"]), str(word["run_id"])
        return Seat(first, size, LOOPBACK, port, self._interface, int(word["attempt"]), run_id)

    def _join(self, patience: Patience) -> _Link:
        job = self._job
        deadline = time.monotonic() + job.join_timeout_s
        while True:
            patience()
            try:
                sealed = self._call()
                break
            except NotSealed as error:
                raise UsageError(
                    f"machine 0 at {job.master_addr}:{job.master_port} refused this one: {error}"
                ) from error
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"machine 0 could not be reached at {job.master_addr}:{job.master_port} within "
                        f"{job.join_timeout_s:.0f} s: {error.strerror or error}"
                    ) from error
                time.sleep(RETRY_S)
        self._interface = interface_of(sealed.local_address())
        sealed.send_word(want="join", node=job.node_rank, nodes=job.nodes, ranks=job.ranks)
        link = _Link(0, sealed, self._inbox)
        threading.Thread(target=link.read, name="member", daemon=True).start()
        return link

    def stop_asked(self) -> bool:
        self._hear(0.0)
        return self._stop is not None or bool(self._lost)

    def failed(self, failure: Failure) -> None:
        if self._link is not None:
            self._link.say(kind="failed", failure=asdict(failure))

    def settle(self, failure: Failure | None, again: bool, patience: Patience) -> Verdict:
        if self._link is not None:
            self._link.say(kind="ended", failure=None if failure is None else asdict(failure), again=again)
        try:
            word = self._await("verdict", patience)
        except LaunchError as error:
            return Verdict(failure or Failure((), "node", 1, str(error)), again=False)
        return Verdict(failure_from(word["failure"]) if word.get("failure") else None, bool(word.get("again")))

    def _await(self, kind: str, patience: Patience) -> dict[str, Any]:
        while True:
            patience()
            found = self._hear(SLICE_S, kind)
            if found is not None:
                return found
            if self._lost:
                raise LaunchError(f"machine 0 was lost: {self._lost}")

    def _hear(self, seconds: float, wanted: str = "") -> dict[str, Any] | None:
        while True:
            try:
                _, word = self._inbox.get(seconds > 0, seconds or None)
            except queue.Empty:
                return None
            seconds = 0.0
            kind = word.get("kind")
            if kind == "stop":
                self._stop = failure_from(word["failure"])
            elif kind == "refused":
                raise UsageError(f"machine 0 refused this one: {word.get('reason')}")
            elif kind == "lost":
                self._lost = word["reason"]
            elif kind == wanted:
                return word

    def close(self) -> None:
        self._tunnel.close()
        if self._link is not None:
            self._link.close()


def meet_nodes(job: Job, note: Note) -> Nodes:
    """This machine's side of the job's machines."""
    if job.nodes == 1:
        return Alone(job)
    return Member(job, note) if job.node_rank else Head(job, note)


def best(failures: Sequence[Failure]) -> Failure | None:
    """The failure to show: one that is a cause, in the order in which they became known."""
    return min(failures, key=lambda failure: (failure.follows, failure.kind == "node"), default=None)


def failure_from(fields: dict[str, Any]) -> Failure:
    """A failure as another machine described it. All that is shown of it is text."""
    ranks = tuple(int(rank) for rank in fields.get("ranks", ()))
    lines = {name: tuple(str(line)[:300] for line in fields.get(name, ())[:12]) for name in ("details", "others")}
    step = fields.get("step")
    return Failure(
        ranks=ranks,
        kind=str(fields.get("kind", "")),
        exit_code=int(fields.get("exit_code", 1)) & 0xFF,
        summary=str(fields.get("summary", ""))[:500],
        details=lines["details"],
        others=lines["others"],
        step=step if isinstance(step, int) else None,
        follows=bool(fields.get("follows")),
    )


def interface_of(address: str) -> str:
    """The network interface that has `address`; empty when none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without such an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _listen(job: Job) -> socket.socket:
    """The one socket that other machines can reach: on the address that was named, never on all of them."""
    try:
        family, *_, place = socket.getaddrinfo(job.master_addr, job.master_port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(place[0])):
            raise UsageError(
                f"master_addr={job.master_addr} stands for {place[0]} on this machine, which others cannot reach; "
                f"give the number of an address that they reach"
            )
        return socket.create_server(place[:2], family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"machine 0 cannot listen at {job.master_addr}:{job.master_port}: {error.strerror or error}; expected an "
            f"address of this machine in master_addr and a free port in master_port"
        ) from error
