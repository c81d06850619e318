"""The error that ends a rank, sent to the others before its process exits.

Otherwise they would only learn of its death, and on several machines its log is elsewhere. The notice is posted
on the group's store when the main thread has ended with an exception: before other threads are joined, and while all
connections still stand. The launcher is told as well: on a busy machine an interpreter takes seconds to end.
"""

import os
import sys
import threading
import time
import traceback
from functools import cache

from paceline.collectives.peers import PeerBoard, own_states
from paceline.collectives.store_call import StoreCall
from paceline.errors import BackwardAborted, CollectiveError, PeerAbsent, PeerLost
from paceline.rank_report import FAILING, report

POST_S = 0.5
# A rank whose process holds the store stays this long for others to read it there.
STAY_S = 1.0
LOOK_S = 0.02
LINES, WIDTH = 24, 200
CONSEQUENCES = (PeerLost, PeerAbsent, BackwardAborted)  # of what another rank did, or did not do


@cache
def failures_posted_at_exit() -> None:
    """After the first call, an exception that ends this process is posted to all of its groups."""
    threading._register_atexit(_post, os.getpid())  # type: ignore[attr-defined]  # in order, unlike atexit's


def notice_of(error: BaseException) -> str:
    """The end of a traceback, marked so that it is not mistaken for a traceback of the rank that shows it."""
    text = "".join(traceback.format_exception(error)).rstrip()
    lines = [line[:WIDTH] for line in text.splitlines()]
    if len(lines) > LINES:
        lines = [lines[0], "  …", *lines[2 - LINES :]]
    return "\n".join(f"  | {line}" for line in lines)


def _post(pid: int) -> None:
    error = getattr(sys, "last_value", None)
    # Ctrl-C is no failure, an interactive session continues after an error, and a rank that fails because of another
    # one has nothing to report.
    if os.getpid() != pid or hasattr(sys, "ps1") or not isinstance(error, Exception) or isinstance(error, CONSEQUENCES):
        return
    report(FAILING, error=traceback.format_exception_only(error)[-1].strip()[:WIDTH])
    if isinstance(error, CollectiveError):  # the others raise it as well
        return
    notice = notice_of(error)
    for store, rank, own in own_states():
        own.say(failed=notice)
        board = PeerBoard(store, rank, own.size)
        deadline = time.monotonic() + (STAY_S if own.hosts_store else 0.0)
        while not _have_read(board, rank) and time.monotonic() < deadline:
            time.sleep(LOOK_S)


def _have_read(board: PeerBoard, rank: int) -> bool:
    """Post, and check whether all others know or fail themselves. Also True if further waiting is useless."""
    call = StoreCall(lambda _: board.exchange())
    try:
        if not call.wait(POST_S):
            return True
    except RuntimeError:  # the store has ended, so no rank can read it
        return True
    return all(rank in record.blames or record.ended or record.failed for record in call.result().values())
