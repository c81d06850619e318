"""A thread of a rank that tells its launcher two things: that Python runs here, and in which line a rank rests.

Without the first, a rank in which native code keeps the interpreter's lock looks like one that waits. The second is
sent when the rank has noted nothing for a while, so a launcher can say where, and not only that, it makes no progress.
"""

import _thread
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
    """Start the thread, for a rank that has a launcher. It needs some microseconds twice a second."""
    if memory is not None and REPORT_NAME in os.environ:
        _thread.start_new_thread(_beat, (memory, threading.main_thread().ident))


def _beat(memory: memoryview, main: int | None) -> None:
    noted, since, said = (0, 0, 0), 0.0, ""
    while True:
        now = time.monotonic()
        BEAT.pack_into(memory, BEAT_AT, time.monotonic_ns())
        newest = NOTE.unpack_from(memory)
        if newest != noted:
            noted, since, said = newest, now, ""
        elif now - since >= RESTS_S and noted[2] not in (Phase.IDLE, Phase.DONE, Phase.WAITING):
            stack = _stack(sys._current_frames().get(main or 0))
            if "".join(stack) != said:
                said = "".join(stack)
                report("rests", stack=stack)
        time.sleep(EVERY_S)


def _stack(frame: FrameType | None) -> list[str]:
    """The innermost frames, as faulthandler writes them, and the innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return lines
