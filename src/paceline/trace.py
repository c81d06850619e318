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
    BACKWARD_BEGIN = "backward begin"
    BACKWARD_END = "backward end"  # autograd has produced its last gradient
    READY = "ready"  # all gradients of a bucket are in it
    LAUNCHED = "launched"
    COMPLETED = "completed"  # first seen complete
    WAIT_ENTERED = "wait entered"
    WAIT_LEFT = "wait left"


class Stamp(NamedTuple):
    """One moment. `bucket` is -1 for moments of the whole backward."""

    ns: int
    moment: Moment
    backward: int
    bucket: int


class Trace:
    """The newest stamps of one replica."""

    def __init__(self, capacity: int = 8192) -> None:
        self._stamps: deque[Stamp] = deque(maxlen=capacity)

    def stamp(self, moment: Moment, backward: int, bucket: int = -1) -> None:
        self._stamps.append(Stamp(time.perf_counter_ns(), moment, backward, bucket))

    def stamps(self) -> list[Stamp]:
        """The stamps still held, oldest first."""
        return list(self._stamps)
