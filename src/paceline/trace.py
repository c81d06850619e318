"""What happened when, on this rank: stamps in a ring buffer.

Writing a stamp costs a fraction of a microsecond, so tracing is always on. Reading and drawing belongs to `observe`.
"""

import time
from collections import deque
from enum import Enum
from typing import NamedTuple


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
    COMPLETED = "completed"  # first seen complete
    WAIT_ENTERED = "wait entered"
    WAIT_LEFT = "wait left"
    OPTIMIZER_BEGIN = "optimizer begin"
    OPTIMIZER_END = "optimizer end"


class Stamp(NamedTuple):
    """One moment. `bucket` is -1 for moments of the whole backward."""

    ns: int
    moment: Moment
    backward: int
    bucket: int


# A bucket has five stamps in a backward. The ring holds some whole steps, however many buckets there are.
STAMPS_PER_BUCKET = 5
WHOLE_STEPS = 4


class Trace:
    """The newest stamps of one replica."""

    def __init__(self, capacity: int = 8192) -> None:
        self._stamps: deque[Stamp] = deque(maxlen=capacity)
        self._highest_bucket = capacity // (STAMPS_PER_BUCKET * WHOLE_STEPS)  # that there is room for

    def stamp(self, moment: Moment, backward: int, bucket: int = -1) -> None:
        if bucket > self._highest_bucket:
            self._make_room(2 * bucket)
        self._stamps.append(Stamp(time.perf_counter_ns(), moment, backward, bucket))

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
