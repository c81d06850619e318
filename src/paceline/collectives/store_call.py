"""Calls to a store that their caller can end, and threads that must finish before the interpreter shuts down.

Why processes crashed at the end of their script
---------------------------------------------
From some point of its shutdown on, Python ends every other thread that takes the GIL, by `pthread_exit`. Inside
C++ that does not unwind: the process aborts ("terminate called without an active exception") or crashes. Two kinds of
threads ask for the interpreter late:

- a `StoreCall` that comes back from the store, and
- gloo's own threads. Each releases a collective shortly after its waiter has continued, and if it is the
  last to hold a tensor it must free the Python object of it. `dist.all_reduce(torch.ones(40000))` as the last line of a
  script is enough.

Both need microseconds, or seconds on a busy machine, and the main thread would not wait for them. So it does, in
an exit handler: those run while threads can still get the interpreter. A thread that waits for a peer or for a silent
store is not waited for: it is not about to return, and an abandoned collective never releases its tensors (see
`torch_dist.SlicedWork`).
"""

import _thread
import atexit
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

WITHIN_S = 2.0
PAUSE_S = 0.002
CALM = 3  # looks in a row
GLOO = "pt_gloo_runloop"  # what torch calls gloo's threads
_TASKS = Path("/proc/self/task")


class StoreCall(Generic[T]):
    """A call to a store, on a thread of its own. It is a `Work`, so it can be waited for like any collective.

    Why a thread
    ------------
    A TCPStore answers from a thread of the process that hosts it, usually rank 0. If that process is stopped, even
    `check` blocks its caller for the store's whole timeout (five minutes), ignoring Ctrl-C. And `Store.wait` with a
    short timeout does not help: TCPStore prints two warnings each time, FileStore sleeps a whole second.

    The thread is a bare one: `threading.Thread` and `Event` would cost 130 µs more in every checked collective.
    """

    def __init__(self, call: Callable[["StoreCall[T]"], T]) -> None:
        self._call = call
        self._result: T | None = None
        self._error: Exception | None = None
        self._over = False
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._stopping = False
        self._all = calls_joined_at_exit()
        self._all.add(self)
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._result = self._call(self)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            self._over = True
            self._all.discard(self)
            self._running.release()

    def done(self) -> bool:
        return self._over

    def wait(self, seconds: float) -> bool:
        if not self._join(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> T:
        assert self._over
        assert self._error is None
        return self._result  # type: ignore[return-value]

    def found(self) -> T | None:
        """The result, if there is one already."""
        return self._result if self._over else None

    def stop(self) -> None:
        """Let the call end at its next `pause`, and wait briefly for that."""
        self._stopping = True
        self._join(0.2)

    def pause(self, seconds: float) -> bool:
        """For the call itself: sleep, and return whether to continue."""
        time.sleep(seconds)
        return not self._stopping

    def _join(self, seconds: float) -> bool:
        if not self._over and self._running.acquire(timeout=seconds):
            self._running.release()
        return self._over


@cache
def calls_joined_at_exit() -> set[StoreCall[Any]]:
    """The calls of this process that are still running. After the first use, the process waits for them at exit,
    and for gloo's threads."""
    running: set[StoreCall[Any]] = set()
    atexit.register(join_threads, running, os.getpid())
    return running


def join_threads(running: set[StoreCall[Any]], pid: int) -> None:
    """Wait until the calls that process `pid` has started are over and gloo's threads are idle, but only briefly.

    In a child that was forked off, none of these threads exists.
    """
    deadline, calm = time.monotonic() + WITHIN_S, 0
    while calm < CALM and time.monotonic() < deadline:
        # Sleeping lets the other threads get the GIL.
        time.sleep(PAUSE_S)
        over = os.getpid() != pid or all(call.done() for call in list(running))
        calm = calm + 1 if over and not _gloo_is_busy() else 0


def _gloo_is_busy() -> bool:
    """Whether a thread of gloo's runs or wants to. One that is idle, or waits for a peer, sleeps."""
    try:
        tasks = list(_TASKS.iterdir()) if _TASKS.is_dir() else []
    except OSError:  # no further file can be opened: assume that they are busy
        return True
    for task in tasks:
        try:
            if (task / "comm").read_text().strip() == GLOO:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "S":
                    return True
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return False
