"""What must be over before the interpreter is taken down.

Why processes died when their script was over
---------------------------------------------
From some point of its end on, Python ends every other thread that asks for the interpreter, by `pthread_exit`. Inside
C++ that does not unwind: the process aborts ("terminate called without an active exception") or crashes. Two kinds of
threads ask for the interpreter late:

- a `StoreCall` that comes back from the store, and
- gloo's own threads. Each lets go of a collective some moments after whoever waited for it went on, and when it is the
  last to hold a tensor it must free the Python object of it. `dist.all_reduce(torch.ones(40000))` as the last line of a
  script is enough.

Both need microseconds, and have seconds on a busy machine, since the main thread need not wait for them. So it does, in
an exit handler: those run while threads can still get the interpreter. A thread that waits for a peer or for a silent
store is not waited for: it is not about to come back, and what an abandoned collective holds is never given back (see
`torch_work.SlicedWork`).
"""

import atexit
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

WITHIN_S = 2.0
PAUSE_S = 0.002
CALM = 3  # looks in a row
GLOO = "pt_gloo_runloop"  # what torch calls gloo's threads
_TASKS = Path("/proc/self/task")


class RunningCalls:
    """The threads that this process has started and that are still at work. Each is known by a question: is it over?"""

    def __init__(self) -> None:
        self._over: dict[int, Callable[[], bool]] = {}
        self._pid = os.getpid()

    def add(self, key: int, over: Callable[[], bool]) -> None:
        self._over[key] = over

    def remove(self, key: int) -> None:
        self._over.pop(key, None)

    def all_over(self) -> bool:
        # The threads of a parent process are not here.
        return os.getpid() != self._pid or all(over() for over in list(self._over.values()))


@cache
def settled_at_exit() -> RunningCalls:
    """The process's running threads. From the first call on, its end waits for them, and for those of gloo."""
    running = RunningCalls()
    atexit.register(settle, running)
    return running


def settle(running: RunningCalls) -> None:
    """Wait until our threads are over and those of gloo are idle, for a moment at most."""
    deadline, calm = time.monotonic() + WITHIN_S, 0
    while calm < CALM and time.monotonic() < deadline:
        # To sleep is what lets the others get the interpreter.
        time.sleep(PAUSE_S)
        calm = calm + 1 if running.all_over() and not _gloo_is_busy() else 0


def _gloo_is_busy() -> bool:
    """Whether a thread of gloo's runs or wants to. One that is idle, or waits for a peer, sleeps."""
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            if (task / "comm").read_text().strip() == GLOO:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "S":
                    return True
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return False
