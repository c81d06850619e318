"""The batches of a DataLoader whose workers may die: the loop gets a typed error that names the worker and how it died.

torch reports the death of a worker as a RuntimeError from its SIGCHLD handler, at whatever line of the training loop
runs at that moment. Here a thread watches the workers, and a death is raised where the next batch is requested.
Iterating again then continues after the last batch that the loop has received.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.errors import PacelineError
from paceline.process_status import oom_kills, read_status, signal_name

_DEATH_OF_TORCH = "DataLoader worker (pid"
_ERROR_OF_DATASET = "Caught "  # torch's prefix for an exception that was raised in a worker
_EXIT_S = 5.0  # on a busy machine a pipe may break this long before the process at its other end has ended
# A worker that was stopped by a signal is reported without any timeout, but only after this pause.
STOPPED_S = 3.0
LOOK_S = 0.5
_END = object()


class WorkerDied(PacelineError, RuntimeError):
    """A DataLoader worker died, or delivered no batch before the timeout."""


class WorkerGuard:
    """Iterates a DataLoader, one epoch per `batches`, and reports what happened to a worker that died.

    A worker that was stopped (SIGSTOP) while the loop waits for a batch is reported too, after STOPPED_S; and with a
    `timeout` above 0, workers that deliver no batch in that many seconds. Then all are killed. torch's own timeout does
    not cover a worker that freezes while its batch is being handed over.

    Nothing that this object holds refers back to it. Workers end with the last reference to their iterator, and with a
    reference cycle they would live until the garbage collector runs.
    """

    def __init__(self, *, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._loader: DataLoader[Any] | None = None
        self._kept: Any = None  # the iterator of persistent workers

    def batches(self, build: Callable[[], DataLoader[Any]], describe: Callable[[range], str]) -> Iterator[Any]:
        """The batches of one epoch. Raises WorkerDied.

        `build` makes a DataLoader whose next iteration begins at the loop's position. `describe` says which samples are
        in batches that are counted from there.
        """
        epoch = _Epoch(self._kept, self._timeout)
        try:
            epoch.check_alive()
            epoch.watch(self._begin(build))
            while (batch := epoch.next()) is not _END:
                yield batch
                epoch.delivered += 1
        except BaseException as error:
            found = epoch.failure(error)
            epoch.close()
            # After a loop was left there is nothing to do: torch ends the workers with the last reference to their
            # iterator. The traceback of any other error would keep them alive.
            if epoch.is_broken or not isinstance(error, GeneratorExit):
                _discard(epoch.iterator)
                self.close()
            if found is None:
                raise
            what, batches = found
            raise WorkerDied(
                f"rank {self._rank}: {what} while loading {describe(batches)}. No batch is lost: iterate over "
                f"the loader again to continue with new workers. To find the cause, load these samples with "
                f"num_workers=0; if memory runs out, use fewer workers or a smaller prefetch_factor"
            ) from error
        finally:
            epoch.close()

    def close(self) -> None:
        """End persistent workers; the next epoch starts new ones."""
        self._kept = self._loader = None

    def _begin(self, build: Callable[[], DataLoader[Any]]) -> Any:
        if self._loader is None:
            self._loader = build()
        if self._loader.num_workers:
            get_temp_dir()  # workers use that of their parent; a folder of their own stays behind when they are killed
        iterator: Any = iter(self._loader)
        if getattr(iterator, "_worker_pids_set", False):  # torch's handler raises for the workers that it knows
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        if self._loader.persistent_workers:
            self._kept = iterator
        return iterator


class _Epoch:
    """One pass over an iterator of a DataLoader, and the thread that watches its workers, if it has any.

    When a worker dies or the timeout passes, the thread kills all workers and ends the wait for a batch. torch polls
    every 5 s, and not while a message is partly read.
    """

    def __init__(self, iterator: Any, timeout: float) -> None:
        self.iterator = iterator
        self.delivered = 0
        self._broken = threading.Event()
        self._dead: tuple[int, int] | None = None  # number and exit code
        self._timeout = timeout
        self._waiting_since: float | None = None
        self._overdue = ""  # the description of a timeout or stop, once there is one
        self._oom_kills = oom_kills()
        self._end = -1
        self._thread: threading.Thread | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the workers were killed."""
        return self._broken.is_set()

    @property
    def _workers(self) -> list[Any]:
        return getattr(self.iterator, "_workers", [])

    def check_alive(self) -> None:
        """Raise if a persistent worker has died."""
        for number, worker in enumerate(self._workers):
            if code := worker.exitcode:
                self._dead = number, code
                raise ChildProcessError("a DataLoader worker has died")

    def watch(self, iterator: Any) -> None:
        self.iterator = iterator
        if self._workers:
            self._end = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._watch, name="paceline-data-workers", daemon=True)
            self._thread.start()

    def next(self) -> Any:
        """The next batch, or _END."""
        self._waiting_since = time.monotonic()
        try:
            return next(self.iterator, _END)
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._thread is not None:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            os.close(self._end)
            self._thread = None

    def _watch(self) -> None:
        living = dict(enumerate(self._workers))
        stopped_since: dict[int, float] = {}
        while living and self._dead is None and not self._overdue:
            numbers = {worker.sentinel: number for number, worker in living.items()}
            ready = wait([*numbers, self._end], min(LOOK_S, self._timeout / 4 if self._timeout else LOOK_S))
            if self._end in ready:
                return
            for sentinel in ready:
                number = numbers[sentinel]
                if code := exit_code(living.pop(number)):  # a worker that has finished exits with 0
                    self._dead = number, code
            now, since = time.monotonic(), self._waiting_since
            if since is None:
                stopped_since.clear()
                continue
            stopped = {number: worker.pid for number, worker in living.items() if read_status(worker.pid).stopped}
            stopped_since = {number: stopped_since.get(number, now) for number in stopped}
            named = ", ".join(f"worker {number} (pid {pid})" for number, pid in stopped.items())
            by_whom = f"stopped by a signal such as SIGSTOP: {named or 'none of them'}"
            if self._timeout and now - since >= self._timeout:
                self._overdue = f"delivered no batch in {self._timeout:g} s ({by_whom})"
            elif now - max(since, min(stopped_since.values(), default=now)) >= STOPPED_S:
                self._overdue = f"deliver no batch ({by_whom})"
        if self._dead is not None or self._overdue:
            self._break()

    def _break(self) -> None:
        """End the wait for a batch, at once."""
        for worker in self._workers:  # all of them: the batch of one may wait behind that of another
            worker.kill()
        self._broken.set()
        if hasattr(self.iterator, "_pin_memory_thread"):
            self.iterator._data_queue.put(None)  # a waiting reader fails to unpack it
        else:
            self.iterator._worker_result_queue._writer.close()

    def failure(self, error: BaseException) -> tuple[str, range] | None:
        """What happened to a worker, if it caused `error`, and which of the next batches it had."""
        if not isinstance(error, Exception):
            return None
        said, count = str(error), len(self._workers)
        of_torch = isinstance(error, RuntimeError) and said.startswith(_DEATH_OF_TORCH)
        broken_pipe = isinstance(error, OSError | EOFError) and not said.startswith(_ERROR_OF_DATASET)
        if self._thread is not None and (of_torch or broken_pipe):
            self._broken.wait(_EXIT_S)
        if self._overdue:
            return f"the {count} DataLoader workers {self._overdue}", range(1)
        if self._dead is not None:
            number, code = self._dead
            what = f"DataLoader worker {number} of {count} (pid {self._workers[number].pid}) {self._how(code)}"
            # Batches go to the workers in turn, and each is given a few ahead.
            return what, range((number - self.delivered) % count, count * self.iterator._prefetch_factor, count)
        return (said.strip().rstrip("."), range(1)) if of_torch else None  # it exited with code 0, or while it started

    def _how(self, code: int) -> str:
        if code >= 0:
            return f"exited with code {code}"
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return "was killed by the OOM killer"
        return f"was killed by {signal_name(-code)}"


def _discard(iterator: Any) -> None:
    """Shut down an iterator without torch's own shutdown, which takes locks that killed workers may hold."""
    if getattr(iterator, "_shutdown", True):  # it has no workers, or no longer has them
        return
    iterator._shutdown = True
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join()
    if (pinning := getattr(iterator, "_pin_memory_thread", None)) is not None:
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))  # wakes the thread, which otherwise polls every 5 s
        pinning.join(_EXIT_S)
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()
        queue.close()
        if (feeder := getattr(queue, "_thread", None)) is not None:
            feeder.join(_EXIT_S)


def exit_code(worker: Any) -> int | None:
    """The exit code of a process that has ended.

    `join()` alone may return without one: the loop's thread checks too when a pipe breaks, and the thread that got the
    code from the kernel may not have stored it yet.
    """
    deadline = time.monotonic() + _EXIT_S
    worker.join(_EXIT_S)
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)
    code: int | None = worker.exitcode
    return code
