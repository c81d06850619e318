"""The one place where a rank waits for others."""

import time
from typing import Any

import torch

from paceline.collectives.api import Watch, Work
from paceline.errors import PacelineError, PeerAbsent

# Long enough to cost nothing, short enough that Ctrl-C is felt at once: Python runs signal handlers between slices.
SLICE_S = 0.1


def finish(work: Work, *, what: str, watch: Watch, timeout_s: float | None = None) -> None:
    """Wait for `work` until it is complete, or raise a typed error that says who is missing.

    `what` names the wait in reports, e.g. "bucket 2 of backward 17". `timeout_s=None` waits as long as the transport
    itself does.
    """
    started = time.monotonic()
    looked = False
    try:
        while not _wait_slice(work, what, watch, started):
            looked = True
            waited_s = time.monotonic() - started
            watch.look(what, waited_s)
            if timeout_s is not None and waited_s >= timeout_s:
                missing = watch.absent()
                names = ", ".join(f"rank {rank}" for rank in missing) or "an unknown rank"
                raise PeerAbsent(
                    f"waited {waited_s:.1f} s in {what} for {names}, more than timeout={timeout_s:g} s; "
                    f"see what that rank does, or raise the timeout",
                    ranks=missing,
                )
    finally:
        if looked:
            watch.left()


def _wait_slice(work: Work, what: str, watch: Watch, started: float) -> bool:
    try:
        return work.wait(SLICE_S)
    except PacelineError:
        raise
    except RuntimeError as error:
        raise watch.explain(what, time.monotonic() - started, error) from error


class FutureWork:
    """A `torch.futures.Future` that can be waited on with a deadline. Futures have no timed wait, so it polls."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause_s = 0.00005
        while not self._future.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.001)
        self._future.wait()  # orders CUDA streams and raises the hook's own error
        return True
