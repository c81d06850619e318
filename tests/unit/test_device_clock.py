"""The times of a device, read without waiting: a device that is simulated, with a clock of its own."""

import time
from typing import Any

import pytest

from paceline.device_clock import READ_AFTER, DeviceClock, by_device, stamp_end
from paceline.trace import Moment, Stamp, Trace
from paceline.traffic import Collective, CollectiveKind

SUM = Collective(CollectiveKind.ALL_REDUCE, 400)
SLACK_NS = 100_000_000  # a busy machine


class Event:
    def __init__(self, device: "Device", number: int) -> None:
        self._device, self.number = device, number

    def query(self) -> bool:
        return self.number in self._device.came_by

    def elapsed_time(self, end_event: "Event") -> float:
        ns = self._device.came_by[end_event.number] - self._device.came_by[self.number]
        return ns / 1e6


class Device:
    """Comes to the places that it was asked to go to when it is told to, by a clock that is `ahead` of the host's."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.ahead_ns = ahead_ns
        self.asked = 0
        self.came_by: dict[int, int] = {}
        self.capturing = False

    def captures(self) -> bool:
        return self.capturing

    def here(self) -> Event | None:
        if self.capturing:
            return None
        self.asked += 1
        return Event(self, self.asked - 1)

    def after(self, work: object) -> Event | None:
        return self.here() if work == "a work that tells" else None

    def comes_by(self, *at_ns: int) -> None:
        """The next places, each at a time of the host's clock."""
        for ns in at_ns:
            self.came_by[len(self.came_by)] = ns + self.ahead_ns


@pytest.mark.parametrize("ahead_ns", [0, -(10**15), 10**15])
def test_times_are_those_of_the_device_on_the_hosts_clock(ahead_ns: int) -> None:
    device = Device(ahead_ns)
    clock = DeviceClock(device)
    moments = [clock.now() for _ in range(3)]
    assert all(moment is not None and moment.ns is None for moment in moments), "the device has not come by"
    asked = time.perf_counter_ns()
    device.comes_by(asked, asked + 250_000, asked + 1_000_000)
    time.sleep(0.002)
    first, second, third = (moment.ns for moment in moments if moment is not None)
    assert first is not None and second is not None and third is not None
    assert (second - first, third - first) == pytest.approx((250_000, 1_000_000), abs=2)
    assert abs(first - asked) < SLACK_NS


def test_what_the_device_has_not_come_by_is_not_known_and_what_is_known_stays() -> None:
    device = Device()
    clock = DeviceClock(device)
    one, other = clock.now(), clock.now()
    assert one is not None and other is not None
    device.comes_by(time.perf_counter_ns())
    known = one.ns
    assert known is not None and other.ns is None
    device.comes_by(time.perf_counter_ns())
    assert other.ns is not None and one.ns == known


def test_a_busy_device_comes_later_than_it_was_asked_to() -> None:
    """An offset that a queue has made too small is mended as soon as the device has nothing to do."""
    device = Device()
    clock = DeviceClock(device)
    late = clock.now()
    began = time.perf_counter_ns()
    device.comes_by(began + 5_000_000)  # it was busy
    time.sleep(0.006)
    assert late is not None and late.ns is not None
    idle = clock.now()
    device.comes_by(time.perf_counter_ns())
    assert idle is not None and idle.ns is not None and late.ns is not None
    assert idle.ns >= idle.asked_ns
    assert idle.ns <= time.perf_counter_ns(), "nor after it was seen"


def test_clocks_that_drift_apart_stay_within_what_was_asked_and_seen() -> None:
    device = Device()
    clock = DeviceClock(device)
    for _ in range(50):
        moment = clock.now()
        device.ahead_ns += 300_000  # the device's clock is the faster one, by far
        device.comes_by(time.perf_counter_ns())
        assert moment is not None and moment.ns is not None
        assert moment.asked_ns <= moment.ns <= time.perf_counter_ns()


def test_events_are_let_go_of_though_nobody_asks() -> None:
    device = Device()
    clock = DeviceClock(device)
    moments: list[Any] = []
    for _ in range(2 * READ_AFTER):
        moments.append(clock.now())
        device.comes_by(time.perf_counter_ns())
    assert sum(moment.event is not None for moment in moments) <= READ_AFTER


def test_stamps_have_the_devices_times_only_while_they_are_asked_for() -> None:
    device = Device()
    trace = Trace(clock=DeviceClock(device))
    trace.stamp(Moment.READY, 1, 0)
    assert device.asked == 0
    trace.device_times = True
    trace.stamp(Moment.LAUNCHED, 1, 0, SUM)
    trace.device_times = False
    trace.stamp(Moment.WAIT_LEFT, 1, 0, SUM)
    assert [stamp.device is not None for stamp in trace.stamps()] == [False, True, False]
    without = Trace()
    without.device_times = True
    without.stamp(Moment.READY, 1, 0)
    assert without.stamps()[0].device is None, "a host has no other times"


def test_the_end_of_a_collective_is_stamped_if_its_work_tells_it() -> None:
    device = Device()
    trace = Trace(clock=DeviceClock(device))
    trace.device_times = True
    trace.stamp(Moment.LAUNCHED, 3, 1, SUM)
    stamp_end(trace, "a work that tells", 1, SUM)
    stamp_end(trace, "another", 2, SUM)
    ends = [stamp for stamp in trace.stamps() if stamp.moment is Moment.COMPLETED]
    assert [(stamp.backward, stamp.bucket, stamp.collective) for stamp in ends] == [(3, 1, SUM)]


def test_a_graph_that_is_captured_has_no_times() -> None:
    device = Device()
    trace = Trace(clock=DeviceClock(device))
    trace.device_times = True
    trace.stamp(Moment.READY, 1, 0)
    device.comes_by(time.perf_counter_ns())
    device.capturing = True
    trace.stamp(Moment.READY, 1, 1)
    before, during = trace.stamps()
    assert during.device is None
    assert before.device is not None and before.device.ns is None, "a question would end the capture"
    device.capturing = False
    assert before.device.ns is not None


def test_stamps_by_the_device_leave_out_what_it_has_not_completed() -> None:
    device = Device()
    trace = Trace(clock=DeviceClock(device))
    trace.stamp(Moment.FORWARD_BEGIN, 0)  # before the times were asked for
    trace.device_times = True
    for backward in (1, 2):
        for moment in (Moment.LAUNCHED, Moment.WAIT_LEFT):
            trace.stamp(moment, backward, 0, SUM)
    began = time.perf_counter_ns()
    device.comes_by(began, began + 1000, began + 2000)
    found = by_device(trace.stamps())
    assert [(stamp.moment, stamp.backward) for stamp in found] == [(Moment.LAUNCHED, 1), (Moment.WAIT_LEFT, 1)]
    assert found[1].ns - found[0].ns == pytest.approx(1000, abs=2)


def test_stamps_without_a_device_are_as_they_are() -> None:
    stamps = [Stamp(5, Moment.READY, 1, 0), Stamp(3, Moment.READY, 1, 1)]
    assert by_device(stamps) == stamps
