"""A thread of a rank that tells its launcher two things: that Python runs here, and in which line a rank rests.

Without the first, a rank in which native code keeps the interpreter's lock looks like one that waits. The second is
sent when the rank has noted nothing for a while, so a launcher can say where, and not only that, it makes no progress.
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
BEAT_AT = NOTE.size  # in the memory of a rank, behind what it notes
EVERY_S = 0.5
RESTS_S = 2.0  # a rank that has noted nothing for this long says in which line it is
FRAMES = 12


def begin_heartbeat(memory: memoryview | None) -> None:
    """Start the thread, for a rank that has a launcher, if it does not run yet. It needs some microseconds twice a
    second."""
    if memory is not None and REPORT_NAME in os.environ and not BEAT.unpack_from(memory, BEAT_AT)[0]:
        BEAT.pack_into(memory, BEAT_AT, time.monotonic_ns())
        ending = threading.Event()
        atexit.register(_end, memory, ending)
        _thread.start_new_thread(_beat, (memory, threading.main_thread().ident, ending))


def _end(memory: memoryview, ending: threading.Event) -> None:
    """Threads run no more while Python ends, which is no silence to wonder about."""
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
            # A script that notes nothing is in another line at every beat: it rests where it is found twice.
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
