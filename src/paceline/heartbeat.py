"""A thread of a rank that tells its launcher two things: that Python runs here, and at which line a rank has stopped.

Without the first, a rank whose native code holds the GIL looks like one that waits. The second is sent when the rank
has noted nothing for a while, so that a launcher can say where the rank is stuck, and not only that it is.
"""

import _thread
import atexit
import os
import struct
import sys
import threading
import time
from types import FrameType

from paceline.phase import NOTE, Phase
from paceline.rank_report import REPORT_NAME, report

BEAT = struct.Struct("@q")  # time in ns of the monotonic clock
BEAT_AT = NOTE.size  # in the memory of a rank, after its notes
EVERY_S = 0.5
RESTS_S = 2.0  # a rank that has noted nothing for this long reports its current line
FRAMES = 12


def begin_heartbeat(memory: memoryview | None) -> None:
    """Start the thread if this rank has a launcher and the thread does not run yet. It takes some microseconds twice a
    second."""
    if memory is not None and REPORT_NAME in os.environ and not BEAT.unpack_from(memory, BEAT_AT)[0]:
        BEAT.pack_into(memory, BEAT_AT, time.monotonic_ns())
        ending = threading.Event()
        atexit.register(_end, memory, ending)
        _thread.start_new_thread(_beat, (memory, threading.main_thread().ident, ending))


def _end(memory: memoryview, ending: threading.Event) -> None:
    """Mark the end: while Python shuts down no threads run, so silence is expected."""
    ending.set()
    BEAT.pack_into(memory, BEAT_AT, 0)


def _beat(memory: memoryview, main: int | None, ending: threading.Event) -> None:
    noted, since = (-1, 0, 0), 0.0
    seen: list[str] = []
    said: list[str] = []
    while not ending.is_set():
        now = time.monotonic()
        BEAT.pack_into(memory, BEAT_AT, time.monotonic_ns())
        newest = NOTE.unpack_from(memory)
        if newest != noted:
            noted, since, said = newest, now, []
        elif now - since >= RESTS_S and noted[2] not in (Phase.IDLE, Phase.DONE, Phase.WAITING):
            before, seen = seen, _stack(sys._current_frames().get(main or 0))
            # A script that makes progress is at another line at every beat; one found twice at a line has stopped
            # there.
            rests = seen if noted[2] != Phase.STARTING or seen == before else []
            if rests != said:
                said = rests
                report("rests", stack=rests)
        time.sleep(EVERY_S)


def _stack(frame: FrameType | None) -> list[str]:
    """The innermost frames, as faulthandler writes them, and the innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return lines
