"""What happened when, on this rank: stamps in a ring buffer.

Writing a stamp costs a fraction of a microsecond, so tracing is always on. Reading and drawing belongs to `observe`.
"""

import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from paceline.traffic import Collective

if TYPE_CHECKING:
    from paceline.device_clock import DeviceClock, DeviceMoment


class Moment(Enum):
    """The moments that are stamped."""

    FORWARD_BEGIN = "forward begin"
    FORWARD_END = "forward end"
    BACKWARD_ENTERED = "backward entered"  # autograd has come to the module; also in microbatches that are not reduced
    BACKWARD_LEFT = "backward left"  # the last thing done inside a backward
    BACKWARD_BEGIN = "backward begin"  # of one that is reduced: its first gradient has come
    BACKWARD_END = "backward end"  # autograd has produced its last gradient
    READY = "ready"  # all gradients of a bucket are in it
    LAUNCHED = "launched"
    COMPLETED = "completed"  # first seen complete; on a device queued at once, so that only the device's time counts
    WAIT_ENTERED = "wait entered"
    WAIT_LEFT = "wait left"
    OPTIMIZER_BEGIN = "optimizer begin"
    OPTIMIZER_END = "optimizer end"


class Stamp(NamedTuple):
    """One moment. `bucket` is -1 for moments of the whole backward, and where parameters are gathered."""

    ns: int
    moment: Moment
    backward: int
    bucket: int = -1
    collective: Collective | None = None  # of those that are launched and waited for
    generation: int = 0  # of the group
    device: "DeviceMoment | None" = None  # when the device came by, if that was asked for


# A bucket has five stamps in a backward, and more where parameters are gathered. The ring holds some whole steps,
# however many buckets there are.
STAMPS_PER_BUCKET = 5
WHOLE_STEPS = 4


class Trace:
    """The newest stamps of one replica."""

    def __init__(self, capacity: int = 8192, clock: "DeviceClock | None" = None) -> None:
        """`clock`: of the device that computes, if it is not the host."""
        self._stamps: deque[Stamp] = deque(maxlen=capacity)
        self._highest_bucket = capacity // (STAMPS_PER_BUCKET * WHOLE_STEPS)  # that there is room for
        self.clock = clock
        self.device_times = False  # whether stamps tell when the device came by, which costs it an event for each
        self.generation = self.backward = 0  # of the group that works now, and of the newest stamp

    def stamp(
        self,
        moment: Moment,
        backward: int,
        bucket: int = -1,
        collective: Collective | None = None,
        device: "DeviceMoment | None" = None,
    ) -> None:
        if bucket > self._highest_bucket:
            self._make_room(2 * bucket)
        if self.device_times and device is None and self.clock is not None:
            device = self.clock.now()
        self.backward, now = backward, time.perf_counter_ns()
        self._stamps.append(Stamp(now, moment, backward, bucket, collective, self.generation, device))

    def _make_room(self, buckets: int) -> None:
        self._highest_bucket = buckets
        self._stamps = deque(self._stamps, maxlen=(buckets + 1) * STAMPS_PER_BUCKET * WHOLE_STEPS)

    @property
    def forgets(self) -> bool:
        """Whether it is full, so that older stamps than those held may be gone."""
        return len(self._stamps) == self._stamps.maxlen

    def stamps(self) -> list[Stamp]:
        """The stamps still held, oldest first."""
        return list(self._stamps)
