"""The current phase and step of this rank, and since when, in memory that its launcher reads (`launch/reports.py`).

A note costs a microsecond. The replica, the step guard, `collectives.group` and the Checkpointer write their own notes.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from paceline.heartbeat import begin_heartbeat
from paceline.phase import NOTE, Phase
from paceline.rank_report import at_clean_exit, inherited_progress

__all__ = ["Phase", "Progress", "own_progress"]


class Progress:
    """The notes of one rank. Without memory, as in a process without a launcher, nothing is noted."""

    _own: "ClassVar[Progress | None]" = None

    def __init__(self, memory: memoryview | None = None) -> None:
        self.step = 0
        self.phase = Phase.STARTING
        self.memory = memory
        self._ends = False
        if memory is not None:
            os.register_at_fork(after_in_child=self._forget)  # a child is not the rank

    def note(self, phase: Phase, step: int | None = None) -> None:
        """Note what this rank is doing, and the step if it has changed."""
        if self.memory is not None:
            self.phase = phase
            self.step = self.step if step is None else step
            NOTE.pack_into(self.memory, 0, time.monotonic_ns(), self.step, phase)

    def begin(self) -> None:
        """Mark this rank as one that reports progress, if it is not marked yet."""
        if self.phase is Phase.STARTING:
            self.note(Phase.IDLE)
            begin_heartbeat(self.memory)

    def end_evaluation(self) -> None:
        """Note the end of an evaluation, if there was one."""
        if self.phase is Phase.EVALUATE:
            self.note(Phase.BETWEEN)

    def stepped(self) -> None:
        """Note the end of an optimizer step."""
        self.note(Phase.BETWEEN, self.step + 1)

    def enter(self, phase: Phase) -> Phase:
        """Note `phase`; return what to note when it is over."""
        self.begin()
        before = self.phase
        self.note(phase)
        return before

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Note `phase` now, and what was noted before again at the end."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.note(before)

    def note_end(self, is_over: Callable[[], bool]) -> None:
        """Note DONE when the script has returned without an error and `is_over()`: a crash after that loses no work."""
        if self.memory is not None and not self._ends:
            self._ends = True
            at_clean_exit(lambda: self.note(Phase.DONE) if is_over() else None)

    def replace_own(self) -> None:
        """Make this the object that `own_progress` returns."""
        Progress._own = self

    def _forget(self) -> None:
        self.memory = None


def own_progress() -> Progress:
    """The progress of this process, for all parts of the library that write notes."""
    # Not by functools.cache, of which Dynamo warns where it traces a forward.
    if Progress._own is None:
        Progress._own = Progress(inherited_progress())
        if os.environ.get("PACELINE_FAULTS"):
            from paceline.faults.armed import arm_from_environment

            arm_from_environment()
    return Progress._own
