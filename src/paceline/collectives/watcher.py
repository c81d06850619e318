"""A thread that watches the peers of a rank whose host does not wait for them.

Where streams order collectives, a host continues while its device waits for another rank. If that rank is dead, or
never arrives, the host is blocked sooner or later in a call that cannot be interrupted, such as `loss.item()`. So a
thread watches: it reports late ranks by name, after the same seconds as a waiting host would, and when a rank has died
it aborts the communicators. The device is then free, the blocked call returns, and the next call of the replica raises
the error that names the rank: later results are useless.
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
from paceline.collectives.watch import StoreWatch
from paceline.errors import PacelineError

logger = logging.getLogger("paceline")

EVERY_S = 0.25


class Unanswered(Protocol):
    """A message of a rank that the others have to answer."""

    @property
    def what(self) -> str: ...

    @property
    def computed(self) -> Work | None:
        """Done when this rank's own device has reached it: after that, only the others can be late."""
        ...

    @property
    def work(self) -> Work:
        """Done when all have answered."""
        ...


class Watcher:
    """Watches what one group has in flight. The thread starts with the first flight and ends with the group."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._flights: deque[Unanswered] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: PacelineError | None = None  # the finding of the thread; raised by the next call of the replica

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
        seen: Unanswered | None = None
        reached = False  # whether this rank's own device had reached it
        since = 0.0  # when this was first so
        while self.error is None and not self._closed:
            time.sleep(EVERY_S)
            group = self._group()
            if group is None:
                return
            flight, had_reached = self._oldest(), reached
            reached = flight is not None and flight.computed is not None and flight.computed.done()
            if flight is not seen or reached is not had_reached:
                if had_reached:
                    group.transport.watch.left()
                seen, since = flight, time.monotonic()
            if flight is not None:
                self._look(group, flight.what, time.monotonic() - since, reached=reached)

    def _oldest(self) -> Unanswered | None:
        """The oldest flight that has not been answered yet."""
        flights = self._flights
        while flights:
            flight = flights[0]
            if not flight.work.done():
                return flight
            if flights and flights[0] is flight:
                flights.popleft()
        return None

    def _look(self, group: Group, what: str, waited_s: float, *, reached: bool) -> None:
        if not group.watching.acquire(blocking=False):
            return  # a user thread waits for the same, and checks itself
        watch = group.transport.watch
        try:
            if reached:
                watch.look(what, waited_s)
            elif isinstance(watch, StoreWatch):  # perhaps in a gather of parameters, from a rank that has died
                watch.look_for_lost(what, waited_s)
        except PacelineError as error:
            self.error = error
            logger.error("%s", error)
            if isinstance(group.transport, TorchDistTransport):
                abort_duplicates(group.transport.users_group)
        finally:
            group.watching.release()
