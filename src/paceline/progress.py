"""Progress words: what each rank of a machine does now, in memory that its launcher reads.

A rank notes its phase and step; that costs about a microsecond and no system call. The launcher reads the words of a
rank whether that rank runs, hangs or is dead. Stamps are of the monotonic clock, which is one for a whole machine.

The replica, the step guard, `collectives.wait` and the Checkpointer note by themselves, so every script that uses them
is seen; `launch/watchdog.py` says what follows from it. In a process without a launcher nothing is noted.
"""

import atexit
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar, NamedTuple

from paceline.tell import describe_descriptor, inherited_descriptor

PROGRESS_NAME = "PACELINE_PROGRESS_FD"
# One cache line for each rank, so that ranks do not slow each other down.
SLOT = 64
_WORDS = struct.Struct("@qqq")  # stamp in ns, step, phase


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


class Mark(NamedTuple):
    """What a rank has noted last, and how long ago. `noted` is False when it never noted anything."""

    phase: Phase
    step: int
    age_s: float
    noted: bool = True


class Progress:
    """A rank's side. Without memory, as in a process without a launcher, nothing is noted."""

    _own: "ClassVar[Progress | None]" = None

    def __init__(self, memory: "mmap.mmap | bytearray | None" = None, offset: int = 0) -> None:
        self.step = 0
        self.phase = Phase.STARTING
        self._memory = memory
        self._offset = offset
        self._ends = False

    @classmethod
    def from_env(cls) -> "Progress":
        """The words of this rank, as its launcher named them in the environment."""
        descriptor = inherited_descriptor(os.environ.get(PROGRESS_NAME, ""))
        slot = os.environ.get("LOCAL_RANK", "")
        if descriptor is not None and slot.isdigit():
            size = os.fstat(descriptor).st_size
            if (int(slot) + 1) * SLOT <= size:
                found = cls(mmap.mmap(descriptor, size), int(slot) * SLOT)
                os.register_at_fork(after_in_child=found._forget)  # a child is not the rank
                return found
        return cls()

    def note(self, phase: Phase, step: int | None = None) -> None:
        """Say what this rank does from now on, and in which step if that is another one."""
        if self._memory is not None:
            self.phase = phase
            self.step = self.step if step is None else step
            _WORDS.pack_into(self._memory, self._offset, time.monotonic_ns(), self.step, phase)

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
        """Have DONE noted when the script has returned without an exception, its threads have ended, and `is_over()`.

        Only then is a crash of the exiting interpreter known to come after the work. Exit handlers run last in, first
        out, and the one that is added when the main thread has ended is before all others.
        """
        if self._memory is None or self._ends:
            return
        self._ends = True

        def mark() -> None:
            if not hasattr(sys, "last_type") and is_over():
                self.note(Phase.DONE)

        threading._register_atexit(atexit.register, mark)  # type: ignore[attr-defined]

    def _forget(self) -> None:
        self._memory = None


def own_progress() -> Progress:
    """The words of this process, for whatever part of the library has something to note."""
    # Not by functools.cache, of which Dynamo warns where it traces a forward.
    if Progress._own is None:
        Progress._own = Progress.from_env()
    return Progress._own


class ProgressBoard:
    """The launcher's side: the words of all ranks of this machine."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, ranks * SLOT)

    @classmethod
    def create(cls, ranks: int) -> "ProgressBoard":
        """A board on which nothing is noted yet. It is memory alone: nothing is left when all its holders end."""
        descriptor = os.memfd_create("paceline-progress")
        os.ftruncate(descriptor, ranks * SLOT)
        return cls(descriptor, ranks)

    @property
    def name(self) -> str:
        """What PACELINE_PROGRESS_FD must say in a rank that inherits the descriptor."""
        return describe_descriptor(self.descriptor)

    def read(self, local_rank: int) -> Mark:
        """What a rank has noted last."""
        stamp, step, phase = _WORDS.unpack_from(self._memory, local_rank * SLOT)
        if stamp == 0:
            return Mark(Phase.STARTING, -1, 0.0, noted=False)
        # A foreign program may have written anything there.
        known = Phase(phase) if phase in Phase.__members__.values() else Phase.IDLE
        return Mark(known, step, max(0.0, (time.monotonic_ns() - stamp) / 1e9))

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
