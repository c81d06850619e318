"""The one place where a rank waits for others."""

import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.collectives.api import Watch, Work
from paceline.errors import PacelineError, PeerAbsent, PeerLost
from paceline.progress import Phase, own_progress

# Long enough to cost nothing, short enough that Ctrl-C is felt at once: Python runs signal handlers between slices.
SLICE_S = 0.1
# With something to do beside the wait: it is done this often.
BESIDE_S = 0.002

Beside = Callable[[], None]


def finish(
    work: Work, *, what: str, watch: Watch, timeout_s: float | None = None, beside: Beside | None = None
) -> None:
    """Wait for `work` until it is complete, or raise a typed error that says who is missing.

    `what` names the wait in reports, e.g. "bucket 2 of backward 17". `timeout_s=None` waits as long as the transport
    itself does. `beside` is called again and again while this rank waits: what it owes to other collectives.
    """
    started = time.monotonic()
    slice_s = SLICE_S if beside is None else BESIDE_S
    before: Phase | None = None  # what was noted before the wait was worth noting
    try:
        while not _wait_slice(work, what, watch, started, slice_s):
            if beside is not None:
                beside()
            if before is None:
                before = own_progress().enter(Phase.WAITING)  # whoever others wait for is not in here
            waited_s = time.monotonic() - started
            try:
                watch.look(what, waited_s)
            except PeerLost:
                # It may have done its part before it ended, and what it sent has only just arrived.
                if _wait_slice(work, what, watch, started, slice_s):
                    return
                raise
            if timeout_s is not None and waited_s >= timeout_s:
                missing = watch.absent()
                names = ", ".join(f"rank {rank}" for rank in missing) or "an unknown rank"
                raise PeerAbsent(
                    f"waited {waited_s:.1f} s in {what} for {names}, more than timeout={timeout_s:g} s; "
                    f"see what that rank does, or raise the timeout",
                    ranks=missing,
                )
    finally:
        if before is not None:
            own_progress().note(before)
            watch.left()


def _wait_slice(work: Work, what: str, watch: Watch, started: float, slice_s: float) -> bool:
    try:
        return work.wait(slice_s)
    except PacelineError:
        raise
    except RuntimeError as error:
        raise watch.explain(what, time.monotonic() - started, error) from error


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Ask until it is done, or until so many seconds have passed, more and more seldom. Returns whether it is done."""
    deadline = time.monotonic() + seconds
    pause_s = 0.00002
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.0005)
    return True


class FutureWork:
    """A `torch.futures.Future` that can be waited on with a deadline. Futures have no timed wait, so it polls."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float) -> bool:
        if not poll(self._future.done, seconds):
            return False
        self._future.wait()  # orders CUDA streams and raises the hook's own error
        return True
