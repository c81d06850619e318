"""Progress words: what each rank of a machine does now, in memory that its launcher reads.

A rank notes its phase and step; that costs about a microsecond and no system call. The launcher reads the words of a
rank whether that rank runs, hangs or is dead. Stamps are of the monotonic clock, which is one for a whole machine.
"""

import mmap
import os
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from paceline.tell import describe_descriptor, inherited_descriptor

PROGRESS_NAME = "PACELINE_PROGRESS_FD"
# One cache line for each rank, so that ranks do not slow each other down.
SLOT = 64
_WORDS = struct.Struct("@qqq")  # stamp in ns, step, phase


class Phase(IntEnum):
    """What a rank does. Inside a step the numbers grow, so the smallest (step, phase) is the rank furthest behind."""

    STARTING = 0
    IDLE = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    REDUCE = 5
    OPTIMIZER = 6
    CHECKPOINT = 7
    EVALUATE = 8
    DONE = 9


class Mark(NamedTuple):
    """What a rank has noted last, and how long ago. `noted` is False when it never noted anything."""

    phase: Phase
    step: int
    age_s: float
    noted: bool = True


class Progress:
    """A rank's side. Without a launcher the words go nowhere."""

    def __init__(self, memory: "mmap.mmap | bytearray", offset: int) -> None:
        self._memory = memory
        self._offset = offset

    @classmethod
    def from_env(cls) -> "Progress":
        """The words of this rank, as its launcher named them in the environment."""
        descriptor = inherited_descriptor(os.environ.get(PROGRESS_NAME, ""))
        slot = os.environ.get("LOCAL_RANK", "")
        if descriptor is not None and slot.isdigit():
            size = os.fstat(descriptor).st_size
            if (int(slot) + 1) * SLOT <= size:
                return cls(mmap.mmap(descriptor, size), int(slot) * SLOT)
        return cls(bytearray(SLOT), 0)

    def note(self, phase: Phase, step: int) -> None:
        """Say what this rank does from now on."""
        _WORDS.pack_into(self._memory, self._offset, time.monotonic_ns(), step, phase)


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
