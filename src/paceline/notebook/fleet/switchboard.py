"""All channels of all ranks in one place: waiting for what they say, and asking them."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from paceline.notebook.events import Died
from paceline.notebook.fleet.keeping import Gone, Keeping, Started
from paceline.notebook.fleet.kernel import Answer, Kernel, Message
from paceline.notebook.fleet.stop import Stop

ALL = ("iopub", "shell", "stdin", "control")
AT_ONCE = 256  # messages of one channel in one turn, so that a chatty rank does not hide the others
LAST_MS = 20  # how long to wait for more of what a dead rank said


@dataclass(frozen=True)
class Heard:
    """One message of one rank."""

    rank: int
    channel: str
    message: Message


class Switchboard:
    """The ranks of a session and the keeper of their processes, as long as the session lives."""

    def __init__(self, kernels: Sequence[Kernel], keeping: Keeping) -> None:
        self.kernels = list(kernels)
        self.keeping = keeping
        self.fresh_deaths: list[Died] = []  # not shown yet
        self._unread: list[Heard] = []

    def living(self) -> list[int]:
        return [kernel.rank for kernel in self.kernels if kernel.died is None and kernel.sockets]

    def turn(self, wait_s: float, channels: Collection[str] = ALL, stop: Stop | None = None) -> list[Heard]:
        """Wait until something comes, and return all that has. Deaths go to `fresh_deaths`."""
        found = [heard for heard in self._unread if heard.channel in channels]
        self._unread = [heard for heard in self._unread if heard.channel not in channels]
        poller, places = self._poller(channels)
        wait_ms = 0 if found else max(0, int(wait_s * 1000))
        for socket, _ in _poll(poller, wait_ms, stop):
            if socket in places:
                rank, channel = places[socket]
                found += self._drain(self.kernels[rank], channel)
        for heard in self.news():
            if heard.channel in channels:
                found.append(heard)
            else:
                self._unread.append(heard)
        return found

    def _poller(self, channels: Collection[str]) -> tuple[zmq.Poller, dict[Any, tuple[int, str]]]:
        poller = zmq.Poller()
        places: dict[Any, tuple[int, str]] = {}
        poller.register(self.keeping.fileno(), zmq.POLLIN)
        for rank in self.living():
            for channel in channels:
                socket = self.kernels[rank].sockets[channel]
                poller.register(socket, zmq.POLLIN)
                places[socket] = (rank, channel)
        return poller, places

    def _drain(self, kernel: Kernel, channel: str) -> Iterator[Heard]:
        now = time.monotonic()
        for _ in range(AT_ONCE):
            message = kernel.receive(channel, now)
            if message is None:
                return
            yield Heard(kernel.rank, channel, message)

    def news(self) -> list[Heard]:
        """Hear the keeper. What a rank said before it died is returned, since its channels are closed."""
        last: list[Heard] = []
        for word in self.keeping.news():
            kernel = self.kernels[word.rank]
            if isinstance(word, Started):
                kernel.pid = word.pid
            else:
                last += self._bury(kernel, word)
        return last

    def _bury(self, kernel: Kernel, word: Gone) -> list[Heard]:
        said: list[Heard] = []
        if kernel.sockets:
            while kernel.sockets["iopub"].poll(LAST_MS):
                said += self._drain(kernel, "iopub")
        try:
            words = self.keeping.last_words(kernel.rank)
        except OSError as error:  # dead it is all the same
            words = (f"its last words cannot be read: {error}",)
        kernel.died = Died(kernel.rank, word.how, words)
        kernel.cell = None
        kernel.close()
        self.fresh_deaths.append(kernel.died)
        return said

    def ask(
        self,
        asked: Mapping[int, Mapping[str, Any]],
        *,
        channel: str = "control",
        kind: str = "paceline_request",
        buffers: Sequence[bytes] = (),
        within_s: float,
        stop: Stop | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> dict[int, Answer]:
        """Send a message to each rank and wait for the answers. Who died or did not answer in time is left out.

        `give_up` is called when one dies, or the user asks to stop: it is to let the others answer soon.
        """
        names = {
            rank: self.kernels[rank].send(channel, kind, content, buffers=buffers)
            for rank, content in asked.items()
            if rank in self.living()
        }
        found: dict[int, Answer] = {}
        until = time.monotonic() + within_s
        obeyed = stop.asked if stop is not None else 0
        while len(found) < len(names) and (left := until - time.monotonic()) > 0:
            for heard in self.turn(min(left, 0.2), (channel,), stop):
                if heard.message["parent_header"].get("msg_id") == names.get(heard.rank, ""):
                    found[heard.rank] = Answer.of(heard.message)
            living = self.living()
            left_over = {rank: name for rank, name in names.items() if rank in living or rank in found}
            if len(left_over) < len(names) or (stop is not None and stop.asked > obeyed):
                names, obeyed = left_over, stop.asked if stop is not None else 0
                give_up()
        return found


def _poll(poller: zmq.Poller, wait_ms: int, stop: Stop | None) -> list[tuple[Any, int]]:
    return poller.poll(wait_ms) if stop is None else stop.wakes(lambda: poller.poll(wait_ms), [])
