"""Reports of a rank to its launcher: JSON lines in a pipe. Without a launcher nothing is sent.

    report("step", step=12, loss=3.1)

The variable PACELINE_REPORT_FD names the descriptor together with its inode. A program that inherits the variable but
not the pipe therefore never writes into another file with the same descriptor number.
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
JOB_NAME = "PACELINE_JOB"  # the same in all processes of one job, and different in any other job
STORE_HOST_NAME = "PACELINE_STORE_HOST"  # the address at which a member on another machine must run its store
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
    """Report something to the launcher. Never raises, and waits only briefly for a launcher that does not read.

    What JSON cannot express is sent as its text. Lines of up to 4 KiB stay whole even when several threads report.
    """
    descriptor = inherited_descriptor(os.environ.get(REPORT_NAME, ""))
    if descriptor is not None:
        line = json.dumps({"kind": kind, **fields}, default=str)
        _write(descriptor, line.encode() + b"\n")


def deliver(line: bytes) -> bool:
    """Hand the launcher a line of at most 4 KiB that must not be dropped. Returns False if the launcher does not
    read."""
    descriptor = inherited_descriptor(os.environ.get(REPORT_NAME, ""))
    # End a line that was cut short before, so that it does not corrupt this one.
    return descriptor is not None and _write(descriptor, b"\n" + line, DELIVERY_S)


def inherited_descriptor(named: str) -> int | None:
    """The descriptor that the launcher named, by its number and inode, if this process really has it."""
    number, _, inode = named.partition(":")
    if not _NAMED.fullmatch(named):
        return None
    try:
        return int(number) if os.fstat(int(number)).st_ino == int(inode) else None
    except OSError:  # not open here: a descendant inherited only the variable
        return None


def _write(descriptor: int, data: bytes, patience_s: float = PATIENCE_S) -> bool:
    """Returns True if all of it was written in time."""
    deadline = time.monotonic() + patience_s
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while data:
        try:
            # The launcher decides whether the pipe blocks; polling first keeps a full pipe from blocking the rank.
            left = deadline - time.monotonic()
            if not room.poll(max(0.0, min(left, SLICE_S)) * 1e3):
                if left <= 0:
                    return False
                continue
            data = data[os.write(descriptor, data[:4096]) :]
        except BlockingIOError:  # another thread filled it between the poll and the write
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

    Exit handlers run last in, first out, so one that is added when the main thread has ended runs before all others.
    """

    def end() -> None:
        if not hasattr(sys, "last_type"):
            act()

    threading._register_atexit(atexit.register, end)  # type: ignore[attr-defined]
