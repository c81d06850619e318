"""When a device came to certain places of what it was given to do, in the time of its host.

Note: how the time of a device is read without waiting for it
-----------------------------------------------------------
At each place an event is queued. Later, when somebody reads stamps and the device has come by, the time from one event
to the next is known exactly. Where that lies on the host's clock follows from two things: the device came to no place
before the host had asked it to, and to all of them before the host saw that it had. A device that has nothing to do
goes to a place at once, so wherever the host is the slower one the first bound is tight. It is never left again, unless
the clocks drift apart. So times of one device compare to the microsecond, and those of several ranks about as well as
their hosts' clocks do.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.traffic import Collective

if TYPE_CHECKING:
    from paceline.trace import Stamp, Trace

READ_AFTER = 1024  # places that nobody has asked about: an event holds memory of the device


class Event(Protocol):
    """An event of a device, queued on one of its streams."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class EventRecorder(Protocol):
    """Queues events on the streams of one device. While a CUDA graph is captured there are none, and none is asked."""

    def captures(self) -> bool: ...

    def here(self) -> Event | None:
        """An event behind all that the current stream was given."""
        ...

    def after(self, work: object) -> Event | None:
        """An event behind a collective, and nothing else. None where its work does not tell when it is over."""
        ...


class DeviceMoment:
    """When a device comes to one place."""

    __slots__ = ("_clock", "asked_ns", "event", "known_ns")

    def __init__(self, clock: "DeviceClock", event: Event) -> None:
        self._clock = clock
        self.event: Event | None = event  # until its time is known
        self.asked_ns = time.perf_counter_ns()
        self.known_ns: int | None = None

    @property
    def ns(self) -> int | None:
        """Nanoseconds of `time.perf_counter_ns`. None: the device has not come by yet. Never waits."""
        if self.known_ns is None:
            self._clock.read()
        return self.known_ns


class DeviceClock:
    """The times of one device."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder
        self._unread: deque[DeviceMoment] = deque()
        self._newest: Event | None = None  # of those that were read
        self._device_ns = 0  # at that one, since the first
        self._offset_ns: int | None = None  # from the device's time to the host's
        self._lock = threading.Lock()

    def now(self) -> DeviceMoment | None:
        """When the device will have done all that the current stream was given."""
        return self._note(self._recorder.here())

    def end_of(self, work: object) -> DeviceMoment | None:
        """When a collective that was launched will be over."""
        return self._note(self._recorder.after(work))

    def _note(self, event: Event | None) -> DeviceMoment | None:
        if event is None:
            return None
        if len(self._unread) >= READ_AFTER:
            self.read()
        moment = DeviceMoment(self, event)
        self._unread.append(moment)
        return moment

    def read(self) -> None:
        """Take in the places that the device has come by, in the order in which it was asked."""
        if self._recorder.captures():
            return
        with self._lock:
            passed: list[tuple[DeviceMoment, int]] = []
            while self._unread and (event := self._unread[0].event) is not None and event.query():
                if self._newest is not None:
                    self._device_ns += round(self._newest.elapsed_time(event) * 1e6)
                self._newest = event
                passed.append((self._unread.popleft(), self._device_ns))
            if passed:
                self._tell(passed, time.perf_counter_ns())

    def _tell(self, passed: Sequence[tuple[DeviceMoment, int]], seen_ns: int) -> None:
        """One offset for all that is read together, so that times between them are right."""
        earliest = max(moment.asked_ns - ns for moment, ns in passed)
        latest = seen_ns - max(ns for _, ns in passed)
        offset = earliest if self._offset_ns is None else max(self._offset_ns, earliest)
        self._offset_ns = min(offset, latest)
        for moment, ns in passed:
            moment.known_ns, moment.event = ns + self._offset_ns, None


def by_device(stamps: Iterable["Stamp"]) -> "list[Stamp]":
    """The stamps in the time of the device, if that was asked for; else as they are. What the device has not come by is
    left out, and with it the whole of a reduction that it has not completed."""
    stamps = list(stamps)
    if not any(stamp.device is not None for stamp in stamps):
        return stamps
    told = [(stamp, stamp.device.ns) for stamp in stamps if stamp.device is not None]
    incomplete = {(stamp.generation, stamp.backward) for stamp, ns in told if ns is None and stamp.bucket >= 0}
    return [
        stamp._replace(ns=ns)
        for stamp, ns in told
        if ns is not None and (stamp.generation, stamp.backward) not in incomplete
    ]


def stamp_end(trace: "Trace", work: object, bucket: int, collective: Collective | None) -> None:
    """Where the times of a device are asked for, have the end of a collective there among the stamps: the host does not
    see it."""
    from paceline.trace import Moment

    if trace.clock is not None and (end := trace.clock.end_of(work)) is not None:
        trace.stamp(Moment.COMPLETED, trace.backward, bucket, collective, end)
