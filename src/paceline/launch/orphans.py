"""Ends what a keeper left behind that was killed itself. Its ranks die with it, but not what they had started."""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

GONE_S = 10.0


def end_sessions(leaders: Collection[int], within_s: float = GONE_S) -> list[int]:
    """Kill all processes in the sessions of `leaders`, wait for their end, and return those that would not.

    A rank leads a session of its own. The number of a session is given to nobody else while one process is in it.
    """
    until = time.monotonic() + within_s
    while (left := _members(leaders)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return left


def _members(leaders: Collection[int]) -> list[int]:
    """Who lives in these sessions; a zombie does nothing any more."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command comes second, in brackets, and may itself contain spaces and brackets.
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(session) in leaders and state not in ("Z", "X"):
                    found.append(int(entry.name))
    return found
