"""What a rank reports to its launcher: JSON lines in a pipe that the launcher reads. Without a launcher, nothing.

    report("step", step=12, loss=3.1)

The variable PACELINE_REPORT_FD names the descriptor together with its inode, so that a program which inherits the
variable and not the pipe never writes into whatever else has the same number there.
"""

import atexit
import json
import mmap
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable

REPORT_NAME = "PACELINE_REPORT_FD"
PROGRESS_NAME = "PACELINE_PROGRESS_FD"
MEMBER_NAME = "PACELINE_MEMBER"  # the number of this process in an elastic job
MEMBERSHIP_NAME = "PACELINE_MEMBERSHIP_FD"  # a pipe in which the launcher tells a member about its generation
STORE_HOST_NAME = "PACELINE_STORE_HOST"  # the address at which a member of other machines is to hold a store
PROGRESS_SLOT = 64  # bytes for each rank: a cache line, so that ranks do not slow each other down
RECORD_NAME = "PACELINE_DETERMINISM"  # a file for what a replica computes, and how many steps of it
RECORD_STEPS_NAME = "PACELINE_DETERMINISM_STEPS"
FAILING = "failing"  # the kind of a report: the script has ended with an exception, and the process is about to
# A launcher that does not read for this long misses the line; training goes on.
PATIENCE_S = 0.05
# What must arrive is waited for longer: a launcher may be stopped for a while.
DELIVERY_S = 60.0
_NAMED, _SLOT = re.compile("[0-9]{1,9}:[0-9]{1,20}"), re.compile("[0-9]{1,9}")
SLICE_S = 0.1  # of a wait, so that Python handles signals


def report(kind: str, **fields: object) -> None:
    """Report something to the launcher. Never raises, and waits only a moment for a launcher that does not read.

    What JSON cannot express is sent as its text. Lines of up to 4 KiB stay whole even when several threads report.
    """
    descriptor = inherited_descriptor(os.environ.get(REPORT_NAME, ""))
    if descriptor is not None:
        line = json.dumps({"kind": kind, **fields}, default=str)
        _write(descriptor, line.encode() + b"\n")


def deliver(line: bytes) -> bool:
    """Hand the launcher a line that must not be dropped, of at most 4 KiB. Returns False when nobody reads."""
    descriptor = inherited_descriptor(os.environ.get(REPORT_NAME, ""))
    # What was cut short before it ends here, so that it does not spoil this line.
    return descriptor is not None and _write(descriptor, b"\n" + line, DELIVERY_S)


def inherited_descriptor(named: str) -> int | None:
    """The descriptor that the launcher named, by its number and inode, if this process really has it."""
    number, _, inode = named.partition(":")
    if not _NAMED.fullmatch(named):
        return None
    try:
        return int(number) if os.fstat(int(number)).st_ino == int(inode) else None
    except OSError:  # not open here: a program further down inherited the variable alone
        return None


def _write(descriptor: int, data: bytes, patience_s: float = PATIENCE_S) -> bool:
    """Whether all of it was written in time."""
    deadline = time.monotonic() + patience_s
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while data:
        try:
            # The pipe blocks or not as the launcher made it; asking first keeps a full one from holding the rank.
            left = deadline - time.monotonic()
            if not room.poll(max(0.0, min(left, SLICE_S)) * 1e3):
                if left <= 0:
                    return False
                continue
            data = data[os.write(descriptor, data[:4096]) :]
        except BlockingIOError:  # another thread filled it between the question and the write
            continue
        except OSError:  # the launcher is gone
            return False
    return True


def inherited_progress() -> memoryview | None:
    """Where this rank notes its progress, as its launcher named it in the environment."""
    descriptor, slot = inherited_descriptor(os.environ.get(PROGRESS_NAME, "")), os.environ.get("LOCAL_RANK", "")
    if descriptor is None or not _SLOT.fullmatch(slot):
        return None
    begin, size = int(slot) * PROGRESS_SLOT, os.fstat(descriptor).st_size
    if begin + PROGRESS_SLOT > size:
        return None
    return memoryview(mmap.mmap(descriptor, size))[begin : begin + PROGRESS_SLOT]


def at_clean_exit(act: Callable[[], None]) -> None:
    """Call `act` when the script has returned without an exception and its threads have ended.

    Exit handlers run last in, first out, and the one that is added when the main thread has ended is before all others.
    """

    def end() -> None:
        if not hasattr(sys, "last_type"):
            act()

    threading._register_atexit(atexit.register, end)  # type: ignore[attr-defined]
