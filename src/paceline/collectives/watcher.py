"""A thread that looks after the peers of a rank whose host does not wait for them.

Where streams order collectives, a host goes on while its device waits for another rank. If that rank is dead, or never
comes, the host is blocked sooner or later in a call that nobody can leave, such as `loss.item()`. So a thread looks
on: it reports ranks that are late, by name and after the same seconds as a waiting host would, and when a rank has
died it aborts the communicators. The device is then free, the blocked call returns, and the next call of the replica
raises the error that names the rank: what was computed since is of no use.
"""

import logging
import threading
import time
import weakref
from collections import deque
from typing import Protocol

from paceline.collectives.group import Group
from paceline.collectives.own_group import abort_duplicates
from paceline.collectives.protocols import Work
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import PacelineError

logger = logging.getLogger("paceline")

EVERY_S = 0.25


class Unanswered(Protocol):
    """Something that a rank has sent, and that the others have to answer."""

    @property
    def what(self) -> str: ...

    @property
    def computed(self) -> Work | None:
        """Done when this rank's own device has come to it: what is missing since then is missing of the others."""
        ...

    @property
    def work(self) -> Work:
        """Done when all have answered."""
        ...


class Watcher:
    """Watches what one group has in flight. The thread begins with the first flight and ends with the group."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._flights: deque[Unanswered] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: PacelineError | None = None  # what the thread has found; raised by the next call of the replica

    def watch(self, flight: Unanswered) -> None:
        """Watch `flight` until it is answered."""
        self._flights.append(flight)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-watcher", daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """Stop watching what was sent so far: no event may be queried while a CUDA graph is captured."""
        self._flights.clear()

    def close(self) -> None:
        """Stop watching; the thread ends soon."""
        self._closed = True

    def _run(self) -> None:
        looked: Unanswered | None = None
        since = 0.0  # when this rank's own device was seen to have come to the oldest flight
        while self.error is None and not self._closed:
            time.sleep(EVERY_S)
            group = self._group()
            if group is None:
                return
            flight = self._oldest()
            if looked is not None and flight is not looked:
                group.transport.watch.left()
                looked = None
            if flight is not None and flight.computed is not None and flight.computed.done():
                since = time.monotonic() if looked is None else since
                looked = flight
                self._look(group, flight.what, time.monotonic() - since)

    def _oldest(self) -> Unanswered | None:
        """The oldest flight that was not answered yet."""
        flights = self._flights
        while flights:
            flight = flights[0]
            if not flight.work.done():
                return flight
            if flights and flights[0] is flight:
                flights.popleft()
        return None

    def _look(self, group: Group, what: str, waited_s: float) -> None:
        if not group.watching.acquire(blocking=False):
            return  # a thread of the user's waits for the same, and looks by itself
        try:
            group.transport.watch.look(what, waited_s)
        except PacelineError as error:
            self.error = error
            logger.error("%s", error)
            if isinstance(group.transport, TorchDistTransport):
                abort_duplicates(group.transport.users_group)
        finally:
            group.watching.release()
