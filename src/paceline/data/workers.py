"""A DataLoader's batches, with workers that may die: they are replaced, and loading goes on where it was.

torch answers the death of a worker with an exception from a signal handler, in whatever line of the training loop runs
at that moment. Here the loop learns of it when it asks for the next batch. A new DataLoader then begins at the first
batch that the loop has not got yet, so nothing is lost or repeated.
"""

import warnings
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.data.keeper import Keeper, Loss
from paceline.errors import PacelineError

_TORCH_SAYS_DEAD = "DataLoader worker (pid"
_DATASET_SAYS = "Caught "  # torch puts it before what was raised in a worker
_DYING_S = 5.0  # a pipe may break this long before its other end is known to be dead, on a machine that is busy


class WorkerDied(PacelineError, RuntimeError):
    """A DataLoader's worker died, or did not answer, more often than it is replaced."""


class Source(Protocol):
    """Who knows where the loop is."""

    def build(self) -> DataLoader[Any]:
        """A DataLoader whose next iteration begins where the loop is."""
        ...

    def describe(self, batches: range) -> str:
        """Which samples are in those batches; they are counted from where the loop is."""
        ...


class Feed:
    """Iterates a source's DataLoader, one epoch per `batches`, and has it built anew when a worker died.

    Nothing that it holds refers back to it: workers end when the last reference is gone, and if that were left to the
    garbage collector, torch would wait 5 s for each of them.
    """

    def __init__(self, *, rank: int, respawns: int, timeout: float) -> None:
        self._rank = rank
        self._respawns = respawns
        self._timeout = timeout
        self._loader: DataLoader[Any] | None = None
        self._kept: Any = None  # the iterator of workers that live on between epochs

    def batches(self, source: Source) -> Iterator[Any]:
        """The batches of one epoch, from where the loop is."""
        for deaths in range(1, self._respawns + 2):
            loss = yield from self._until_death(source)
            if loss is None:
                return
            self._report(loss, deaths, source)

    def close(self) -> None:
        """End workers that live on between epochs; the next epoch starts new ones."""
        _discard(self._kept)
        self._kept = self._loader = None

    def _until_death(self, source: Source) -> Generator[Any, None, Loss | None]:
        """Batches, as long as all workers live. Returns None at the end of the epoch, else what became of one."""
        keeper = Keeper(self._kept, self._timeout)
        iterator: Any = None
        delivered = 0
        try:
            iterator = self._begin(source)
            keeper.watch(iterator)
            while True:
                try:
                    with keeper.waiting():
                        batch = next(iterator)
                except StopIteration:
                    return None
                delivered += 1
                yield batch
        except GeneratorExit:  # the loop was left; torch ends the workers when the iterator goes
            keeper.close()
            if keeper.loss(delivered) is not None:
                _discard(iterator)
                self.close()
            raise
        except BaseException as error:
            loss = _loss(error, keeper, delivered)
            keeper.close()
            # Also when this goes on to the loop: the traceback would keep the workers until it is collected.
            _discard(iterator)
            self.close()
            if loss is None:
                raise
            return loss  # without the error, whose frames lead back to here: see the class
        finally:
            keeper.close()

    def _begin(self, source: Source) -> Any:
        if self._loader is None:
            self._loader = source.build()
        iterator: Any = iter(self._loader)
        if getattr(iterator, "_worker_pids_set", False):  # torch's handler raises for the workers that it knows
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        if self._loader.persistent_workers:
            self._kept = iterator
        return iterator

    def _report(self, loss: Loss, deaths: int, source: Source) -> None:
        what = f"rank {self._rank}: {loss.text} while loading {source.describe(loss.batches)}"
        if deaths > self._respawns:
            again = f" (death {deaths} of a worker in this epoch)" if deaths > 1 else ""
            raise WorkerDied(
                f"{what}{again}. Load these samples with num_workers=0 to see why; workers that are killed by SIGKILL "
                f"usually ran out of memory: use fewer of them or a smaller prefetch_factor"
            )
        warnings.warn(
            f"{what}. Its work is done again by new workers, at the same place ({deaths} of at most {self._respawns} "
            f"times in this epoch)",
            UserWarning,
            stacklevel=4,
        )


def _loss(error: BaseException, keeper: Keeper, delivered: int) -> Loss | None:
    """What became of a worker if that is what an error comes from, else None."""
    if not isinstance(error, Exception):
        return None
    said = str(error)
    torch_says_dead = isinstance(error, RuntimeError) and said.startswith(_TORCH_SAYS_DEAD)
    broken_pipe = isinstance(error, OSError | EOFError) and not said.startswith(_DATASET_SAYS)
    if torch_says_dead or broken_pipe:
        keeper.wait_for_death(_DYING_S)
    found = keeper.loss(delivered)
    if found is None and torch_says_dead:
        return Loss(said.strip().rstrip("."), range(1))  # it left with code 0, or while it was started
    return found


def _discard(iterator: Any) -> None:
    """End what is left of an iterator, not in torch's way: that takes locks which the dead may hold."""
    if getattr(iterator, "_shutdown", True):  # it has no workers, or has them no more
        return
    iterator._shutdown = True
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join()
    if (pinning := getattr(iterator, "_pin_memory_thread", None)) is not None:
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))  # wakes it; else it looks every 5 s
        pinning.join(_DYING_S)
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()
        queue.close()
        if (feeder := getattr(queue, "_thread", None)) is not None:
            feeder.join(_DYING_S)
