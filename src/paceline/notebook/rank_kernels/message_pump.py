"""All channels of all ranks in one place: waiting for their messages, asking them, and the stop button.

One thread drives it, the one that runs the user's cell. The stop button is SIGINT to the user's kernel.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import zmq

from paceline.launch.rank_processes import RankExited, RankProcesses, RankStarted
from paceline.notebook.events import Died
from paceline.notebook.rank_kernels.connection import CHANNELS, KernelConnection, Message, RankReply
from paceline.process_status import oom_kills

REAPER_KILLED = "was killed by the operating system, together with the reaper process that started it"
AT_ONCE = 256  # messages of one channel in one turn, so that a rank with much output does not block the others
LAST_MS = 20  # how long to wait for more output of a dead rank


class StopRequests:
    """Counts requests to stop instead of raising KeyboardInterrupt at arbitrary points.

    A half-handled message or a half-shown line could not be repaired afterwards. Only waiting ends at once, because
    `wakes` becomes readable. Python handles signals in the main thread only; in any other, nothing is counted.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.wakes = -1
        self._before: Any = None
        self._is_set = False

    def __enter__(self) -> "StopRequests":
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._is_set = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            self._is_set = False
            signal.signal(signal.SIGINT, self._before)
        os.close(self.wakes)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        os.eventfd_write(self.wakes, 1)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A block in which SIGINT does what it did before, for the user's own input()."""
        if not self._is_set:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            yield
        except KeyboardInterrupt:
            self.asked += 1
        finally:
            signal.signal(signal.SIGINT, self._note)


@dataclass(frozen=True)
class RankMessage:
    """One message of one rank."""

    rank: int
    channel: str
    message: Message


@dataclass(eq=False)
class PendingReplies:
    """The ids of requests, by rank, and the replies so far. More arrive as long as this object is referenced."""

    asked: Mapping[int, str]
    replies: dict[int, RankReply] = field(default_factory=dict)


class MessagePump:
    """The ranks of a session and their processes, as long as the session lives.

    The processes are children of the launcher's reaper: none of them outlives this process.
    """

    def __init__(self, kernels: Sequence[KernelConnection]) -> None:
        self.kernels = list(kernels)
        self._processes = RankProcesses(streams=subprocess.DEVNULL)
        self._oom_kills = oom_kills()
        self.unreported_deaths: list[Died] = []  # not shown yet
        self._unread: list[RankMessage] = []
        self._pending: WeakSet[PendingReplies] = WeakSet()

    def living(self) -> list[int]:
        return [kernel.rank for kernel in self.kernels if kernel.died is None and kernel.sockets]

    def start_process(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank's process in the folder of this one."""
        if self._processes.reaper_died:
            self._processes.close()
            self._processes = RankProcesses(streams=subprocess.DEVNULL)
        kernel = self.kernels[rank]
        kernel.mark_start()
        out, err = kernel.out.descriptor, kernel.err.descriptor
        self._processes.start(rank, command, environment, folder=Path.cwd(), out=out, err=err)

    def kill(self, rank: int) -> None:
        """SIGKILL to the rank and all processes of its group."""
        self._processes.signal(signal.SIGKILL, rank)

    def close(self) -> None:
        """End all ranks at once, and all that they started."""
        self._processes.close()
        for kernel in self.kernels:
            kernel.close()

    def poll(
        self, wait_s: float, channels: Collection[str] = CHANNELS, stop: StopRequests | None = None
    ) -> list[RankMessage]:
        """Wait until a message comes on these channels, and return all that have come.

        Replies to requests go to their `PendingReplies`, and deaths to `unreported_deaths`.
        """
        found = [received for received in self._unread if received.channel in channels]
        self._unread = [received for received in self._unread if received.channel not in channels]
        poller, places = zmq.Poller(), dict[Any, tuple[int, str]]()
        poller.register(self._processes.fileno(), zmq.POLLIN)
        for rank in self.living():
            for channel in channels:
                socket = self.kernels[rank].sockets[channel]
                poller.register(socket, zmq.POLLIN)
                places[socket] = (rank, channel)
        if stop is not None:
            poller.register(stop.wakes, zmq.POLLIN)
        for socket, _ in poller.poll(0 if found else max(0, int(wait_s * 1000))):
            if stop is not None and socket == stop.wakes:
                os.eventfd_read(stop.wakes)
            elif socket in places:
                rank, channel = places[socket]
                found += self._drain(self.kernels[rank], channel)
        for received in self._take_process_events():
            (found if received.channel in channels else self._unread).append(received)
        return [received for received in found if not self._is_reply(received)]

    def _is_reply(self, received: RankMessage) -> bool:
        parent = received.message["parent_header"].get("msg_id")
        for pending in self._pending:
            if parent and pending.asked.get(received.rank) == parent and received.channel != "iopub":
                buffers = tuple(bytes(buffer) for buffer in received.message.get("buffers", ()))
                pending.replies[received.rank] = RankReply(received.message["content"], buffers)
                return True
        return False

    def _drain(self, kernel: KernelConnection, channel: str) -> Iterator[RankMessage]:
        now = time.monotonic()
        for _ in range(AT_ONCE):
            message = kernel.receive(channel, now)
            if message is None:
                return
            yield RankMessage(kernel.rank, channel, message)

    def _take_process_events(self) -> list[RankMessage]:
        """Note starts and exits. Returns what a rank sent before it died, since its channels are closed then."""
        last: list[RankMessage] = []
        for event in self._processes.events():
            kernel = self.kernels[event.rank]
            if isinstance(event, RankStarted):
                kernel.pid = event.pid
            else:
                last += self._record_death(kernel, event)
        return last

    def _record_death(self, kernel: KernelConnection, event: RankExited) -> list[RankMessage]:
        last: list[RankMessage] = []
        if kernel.sockets:
            while kernel.sockets["iopub"].poll(LAST_MS):
                last += self._drain(kernel, "iopub")
        try:
            last_lines = kernel.last_lines()
        except OSError as error:  # it is dead in any case
            last_lines = (f"its last lines cannot be read: {error}",)
        kernel.died = Died(kernel.rank, self._how(event), last_lines)
        kernel.cell = None
        kernel.disconnect()
        self.unreported_deaths.append(kernel.died)
        return last

    def _how(self, event: RankExited) -> str:
        """Continues "rank 1 "."""
        if event.with_reaper:
            return REAPER_KILLED
        if event.killed_by != signal.SIGKILL:
            return event.how
        before, self._oom_kills = self._oom_kills, oom_kills()
        reason = ", because the machine ran out of memory" if self._oom_kills > before else ""
        return f"{event.how}{reason}"

    def send(
        self,
        requests: Mapping[int, Mapping[str, Any]],
        *,
        channel: str = "control",
        kind: str = "paceline_request",
        buffers: Sequence[bytes] = (),
    ) -> PendingReplies:
        """Send each living rank its request. The replies come with later calls of `poll`."""
        asked = {
            rank: self.kernels[rank].send(channel, kind, content, buffers=buffers)
            for rank, content in requests.items()
            if rank in self.living()
        }
        pending = PendingReplies(asked)
        self._pending.add(pending)
        return pending

    def ask(
        self,
        requests: Mapping[int, Mapping[str, Any]],
        *,
        channel: str = "control",
        kind: str = "paceline_request",
        buffers: Sequence[bytes] = (),
        within_s: float,
        stop: StopRequests | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> dict[int, RankReply]:
        """Send each rank its request and wait for the replies. Ranks that died or did not reply in time are left out.

        `on_failure` is called when one dies, or the user asks to stop: it is to make the others reply soon.
        """
        pending = self.send(requests, channel=channel, kind=kind, buffers=buffers)
        waiting = set(pending.asked)
        until = time.monotonic() + within_s
        handled = stop.asked if stop is not None else 0
        while waiting - pending.replies.keys() and (left := until - time.monotonic()) > 0:
            self.poll(min(left, 0.2), (channel,), stop)
            died = waiting - pending.replies.keys() - set(self.living())
            asked = stop.asked if stop is not None else 0
            if died or asked > handled:
                waiting, handled = waiting - died, asked
                on_failure()
        return pending.replies
