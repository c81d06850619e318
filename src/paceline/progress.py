"""What this rank does now, in memory that its launcher reads (`launch/reports.py`): a phase, a step, and since when.

A note costs a microsecond. The replica, the step guard, `collectives.group` and the Checkpointer note by themselves.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar

from paceline.rank_report import at_clean_exit, inherited_progress

NOTE = struct.Struct("@qqq")  # time in ns of the monotonic clock, which is one for a whole machine; step; phase


class Phase(IntEnum):
    """What a rank does. Inside a step the numbers grow, so the smallest (step, phase) is the rank furthest behind."""

    STARTING = 0
    IDLE = 1  # before the first step: the script may prepare for as long as it likes
    BETWEEN = 2  # the script's own code, between backwards and optimizer steps
    DATA = 3  # a loop that says so itself is getting its next batch
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    WAITING = 7  # for other ranks, in any phase
    CHECKPOINT = 8
    EVALUATE = 9
    DONE = 10  # the script has returned, and the interpreter is about to exit


class Progress:
    """What one rank notes. Without memory, as in a process without a launcher, nothing is."""

    _own: "ClassVar[Progress | None]" = None

    def __init__(self, memory: memoryview | None = None) -> None:
        self.step = 0
        self.phase = Phase.STARTING
        self._memory = memory
        self._ends = False
        if memory is not None:
            os.register_at_fork(after_in_child=self._forget)  # a child is not the rank

    def note(self, phase: Phase, step: int | None = None) -> None:
        """Say what this rank does from now on, and in which step if that is another one."""
        if self._memory is not None:
            self.phase = phase
            self.step = self.step if step is None else step
            NOTE.pack_into(self._memory, 0, time.monotonic_ns(), self.step, phase)

    def begin(self) -> None:
        """Say that this rank is one whose progress can be seen, if that is not known yet."""
        if self.phase is Phase.STARTING:
            self.note(Phase.IDLE)

    def end_evaluation(self) -> None:
        """Say that an evaluation is over, if there was one."""
        if self.phase is Phase.EVALUATE:
            self.note(Phase.BETWEEN)

    def stepped(self) -> None:
        """An optimizer step is over."""
        self.note(Phase.BETWEEN, self.step + 1)

    def enter(self, phase: Phase) -> Phase:
        """Note `phase`; return what to note when it is over."""
        self.begin()
        before = self.phase
        self.note(phase)
        return before

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Note `phase` now, and at the end again what was noted before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.note(before)

    def note_end(self, is_over: Callable[[], bool]) -> None:
        """Have DONE noted when the script has returned well and `is_over()`: a crash after that loses no work."""
        if self._memory is not None and not self._ends:
            self._ends = True
            at_clean_exit(lambda: self.note(Phase.DONE) if is_over() else None)

    def _forget(self) -> None:
        self._memory = None


def own_progress() -> Progress:
    """The progress of this process, for whatever part of the library has something to note."""
    # Not by functools.cache, of which Dynamo warns where it traces a forward.
    if Progress._own is None:
        Progress._own = Progress(inherited_progress())
    return Progress._own
