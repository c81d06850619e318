"""`Keeper`: the thread that sees a DataLoader's workers die, and ends the wait for those that never will answer."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from threading import Event, Thread
from typing import Any

_REAPED_S = 1.0  # from the end of a process until its exit code can be read


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of a worker, and which batches after those the loop has got it was to make."""

    text: str
    batches: range


class Keeper:
    """Watches the workers of one iterator of a DataLoader; does nothing for one without workers.

    When a worker dies, or `timeout` seconds (0: never) have been waited for a batch, it kills all of them and closes
    the pipe of their answers, so that a wait for more of them ends at once. torch looks every 5 s, and not while a
    message is half read. Its timeout does not cover a worker that freezes with its answer on the way, because the
    memory of a batch is handed over by a thread of the worker.
    """

    def __init__(self, iterator: Any, timeout: float) -> None:
        self._timeout = timeout
        self._iterator: Any = None
        self._workers: list[Any] = []
        self._thread: Thread | None = None
        self._end = -1
        self._since: float | None = None
        self._dead: tuple[int, int] | None = None  # number and exit code
        self._overdue = False
        self._over = Event()
        self.watch(iterator)

    def watch(self, iterator: Any) -> None:
        """Begin to watch, if that has not begun."""
        if self._thread is None and getattr(iterator, "_workers", None):
            self._iterator = iterator
            self._workers = list(iterator._workers)
            self._end = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = Thread(target=self._keep, name="paceline-data-keeper", daemon=True)
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the loop waits for a batch."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def wait_for_death(self, seconds: float) -> None:
        """Wait until a worker has died, but not for ever."""
        if self._thread is not None:
            self._over.wait(seconds)

    def loss(self, delivered: int) -> Loss | None:
        """What became of the workers, if anything did, after so many batches of theirs."""
        count = len(self._workers)
        if self._overdue:  # whoever it was: the answer of one may wait behind that of another
            return Loss(f"the {count} DataLoader workers gave no batch in {self._timeout:g} s", range(1))
        if self._dead is None:
            return None
        number, code = self._dead
        # Batches go to the workers in turn, and each is given a few ahead.
        owed = range((number - delivered) % count, count * self._iterator._prefetch_factor, count)
        pid = self._workers[number].pid
        return Loss(f"DataLoader worker {number} of {count} (pid {pid}) {_ended(code)}", owed)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._thread is not None:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            os.close(self._end)
            self._thread = None

    def _keep(self) -> None:
        living = dict(enumerate(self._workers))
        while living:
            numbers = {worker.sentinel: number for number, worker in living.items()}
            ready = wait([*numbers, self._end], self._timeout / 4 if self._timeout else None)
            if self._end in ready:
                return
            for sentinel in ready:
                number = numbers[sentinel]
                if code := exit_code(living.pop(number)):  # who has nothing more to do leaves with 0
                    self._dead = (number, code)
            since = self._since
            self._overdue = bool(self._timeout and since and time.monotonic() - since >= self._timeout)
            if self._dead or self._overdue:
                self._unblock()
                return

    def _unblock(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._over.set()
        if hasattr(self._iterator, "_pin_memory_thread"):
            self._iterator._data_queue.put(None)  # no answer: whoever waits for one fails to take it apart
        else:
            self._iterator._worker_result_queue._writer.close()


def exit_code(worker: Any) -> int | None:
    """The exit code of a process that has ended.

    `join()` alone may return without one: the loop's thread looks too, when a pipe broke, and whoever has collected the
    code from the kernel may not have noted it yet.
    """
    deadline = time.monotonic() + _REAPED_S
    worker.join(_REAPED_S)
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)
    code: int | None = worker.exitcode
    return code


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
