"""`Loader`: batches for one rank, from a position that a world of any size can continue from."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from paceline.data.batch_source import DealSettings
from paceline.data.cursor import VERSION, Cursor, check_integer
from paceline.data.indexed import IndexedSource
from paceline.data.rank_checks import (
    check_first_batch,
    check_settings,
    rank_and_size,
    ranks_can_compare,
)
from paceline.data.sample_log import SampleLog, SampleLogEntry
from paceline.data.stream import StreamSource
from paceline.data.workers import WorkerGuard
from paceline.errors import IllegalMove, UsageError
from paceline.in_use import uses
from paceline.randomness import mixed

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Distributes a dataset over ranks, through torch's DataLoader, so that no sample is lost or repeated.

        loader = paceline.Loader(dataset, batch_size=32)
        for batch in loader:                    # one epoch, or the rest of it; the next loop is the next epoch
            ...
            optimizer.step()
            loader.commit()
            if checkpoints.due(step): checkpoints.save(step, model=model, optimizer=optimizer, loader=loader)

    The order of an epoch is one permutation of the dataset that follows from (seed, epoch). A global batch is the next
    `batch_size` × `world_size` samples of it, and each rank takes its slice. So `cursor`, which counts the samples of
    all ranks, is the whole position: `state_dict()` can be loaded in a world of another size, with another batch size,
    in the middle of an epoch.

    With `lanes=L` a global batch is `batch_size` × L samples in a world of any size up to L, and slice l of it is the
    microbatch of lane l. Each step yields the list of the microbatches of this rank's lanes, each collated by itself,
    for `model.lanes(microbatches, step)`. Lanes have equal weight, so an incomplete last batch is always dropped.

    A batch counts as committed as soon as the loop receives it, unless the loop calls `commit()`: then everything
    handed out before the last such call counts, and nothing else. Batches that were only prefetched never count. So
    a loop that saves after `optimizer.step()` needs nothing; one that accumulates over several batches, or may save
    between a batch and its step, calls `commit()` after the step, or `commit_on(optimizer)` once (and passes
    `manual_commit=True` if it may save before the first step).

    `drop_last=True` drops the samples at the end of an epoch that do not fill a global batch. Without it the last
    batch is smaller, and some ranks get none of it if it has fewer samples than there are ranks.

    Random numbers that `dataset[i]` draws follow from (seed, epoch, i) alone, so augmentation is the same in every
    world and after every resume (not in streams, nor in datasets that fetch by `__getitems__`). `reseed=False` leaves
    the generators alone, and saves about 30 µs per sample.

    If a worker dies, WorkerDied is raised where the next batch is requested, and also if workers deliver no batch in
    `timeout` seconds. Iterating again continues at the same place with new workers.

    An IterableDataset is sharded: element i goes to rank i mod `world_size`, or lane i mod L. It keeps its own order,
    every rank and worker reads all of it, and resuming in the middle reads and drops the elements before that position,
    unless the dataset has `iter_from(element)`. If it has `set_epoch(epoch)`, that is called.

    `sample_log` is a folder, or a SampleLog, that records the sample indices of every step. `rank` and `world_size`
    come from the process group, or else from the launcher's environment. With a process group of that size the ranks
    compare their settings, and the content of the first batch, so all ranks must iterate (`check=False` skips it).
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
        rank: int | None = None,
        world_size: int | None = None,
        sample_log: SampleLog | str | Path | None = None,
        manual_commit: bool = False,
        reseed: bool = True,
        check: bool = True,
        lanes: int | None = None,
    ) -> None:
        check_integer("batch_size", batch_size, 1)
        check_integer("seed", seed)
        self._follows = rank is None and world_size is None
        rank, size = rank_and_size(rank, world_size, "world_size")
        _check_lanes(lanes, size, drop_last)
        options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers and num_workers > 0,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
        }
        self.dataset = dataset
        self._settings = DealSettings(batch_size, rank, size, shuffle, drop_last, reseed, options, lanes)
        self._source = _source(dataset, self._settings)
        self._workers, self._timeout = WorkerGuard(rank=rank, timeout=timeout), timeout
        self._sample_log = sample_log if isinstance(sample_log, SampleLog | None) else SampleLog(sample_log)
        self._manual = manual_commit
        self._check = check
        self._step = 0
        self._reached = self._committed = Cursor(operator.index(seed))
        self._uncommitted: list[
            SampleLogEntry
        ] = []  # of each batch that was handed out; with a step if it is in the log
        self._step_ahead: int | None = None  # the step of handed out batches, if they are logged at once
        self._iteration = 0  # the number of the current one
        self._moves = 0  # the number of times that the position was set
        self._agreed = False  # ranks have compared their positions
        self._resumed = True  # the next session of the sample log undoes entries past the position
        self._first_batch_seen = False

    @property
    def batch_size(self) -> int:
        """The number of samples per batch of each rank, or lane."""
        return self._settings.batch_size

    @property
    def cursor(self) -> Cursor:
        """The position of the run, as `state_dict` saves it."""
        return self._committed

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or that the next iteration begins."""
        return self._reached.epoch

    @property
    def left(self) -> int:
        """The number of batches of the current epoch that this rank has not received yet."""
        return self._settings.batches(max(0, self._length() - self._reached.committed))

    def __len__(self) -> int:
        """The number of batches that this rank gets in a whole epoch."""
        return self._settings.batches(self._length())

    def _length(self) -> int:
        if self._source.length is not None:
            return self._source.length
        if isinstance(self.dataset, Sized):
            return len(self.dataset)
        raise TypeError(f"{type(self.dataset).__name__} is a stream without a length")

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch, from the loop's position on. Afterwards the loader is in the next epoch."""
        self._iteration += 1
        mine = self._iteration
        self._agree()
        begun = self._reached
        for window in self._source.windows(begun, self._workers):
            uses.tell(self)
            self._look_at_first(window.batch)
            self._reached = Cursor(begun.seed, begun.epoch, window.stop)
            ids, ahead = tuple(window.ids), self._step_ahead or 0
            taken = SampleLogEntry(ahead, self._settings.rank, begun.epoch, window.start, window.stop, ids)
            if ahead and self._sample_log is not None:
                self._sample_log.record(taken)
            self._uncommitted.append(taken)
            if not self._manual:
                self._settle(None)
            yield window.batch
            if self._iteration != mine:
                raise IllegalMove(
                    "this iteration over the Loader has ended: another one was started, or the position was set, while "
                    "it ran; continue with a new `for batch in loader`"
                )
        self._look_at_first(None)
        self._reached = Cursor(begun.seed, begun.epoch + 1)
        if not self._uncommitted:
            self._committed = self._reached

    def endless(self) -> Iterator[Batch]:
        """Batches without end, epoch after epoch. They continue from a position that is set, and after an error from
        the batches handed out before it."""
        return Endless(self)

    def commit(self, step: int | None = None) -> None:
        """Count all batches handed out so far as trained on. `step` is the number of the step in the sample log."""
        self._manual = True
        self._settle(step)

    def begin_step(self, step: int | None) -> None:
        """Log the batches of `step` as soon as they are handed out. A rank may be killed after the others have added
        its gradients and before its own commit, when it can no longer write. The next session undoes a step that no
        rank commits. None: log batches when they are committed, as without this call."""
        self._step_ahead = step

    def commit_on(self, optimizer: Optimizer) -> Any:
        """Call `commit` after every step of `optimizer`. Returns a handle; its `remove()` ends that."""
        self._manual = True
        return optimizer.register_step_post_hook(lambda *_: self.commit())

    def close(self) -> None:
        """End persistent workers and close the sample log. Iterating again starts new ones."""
        self._iteration += 1
        self._workers.close()
        if self._sample_log is not None:
            self._sample_log.close()
            self._agreed = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless the loop is in it already. Not needed: the loader counts epochs
        itself."""
        check_integer("epoch", epoch, 0)
        if epoch != self._reached.epoch:
            self._move(Cursor(self._reached.seed, operator.index(epoch)), resumed=False)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers and text. It is the same on all ranks."""
        cursor = self._committed
        return {
            "version": VERSION,
            "seed": cursor.seed,
            "epoch": cursor.epoch,
            "committed": cursor.committed,
            "step": self._step,
            "length": self._source.length,
            "shuffle": self._settings.shuffle,
            # Drawing an order costs time, and at the beginning of an epoch any order is valid.
            "order": self._source.fingerprint(cursor) if cursor.committed else "",
            "manual_commit": self._manual,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. The order of its epoch is kept, so the saved seed is used from now on."""
        cursor = self._source.read_position(state)
        self._move(cursor, resumed=True)
        self._step = operator.index(state["step"])
        self._manual = self._manual or state["manual_commit"]

    def follow_group(self) -> None:
        """Distribute over the current ranks, from the last commit on. All ranks call it after the world has changed.

        Batches that were handed out since then are delivered again. A loop over `endless()` continues; a loop over the
        loader itself has to be started again.
        """
        if not self._follows:
            raise UsageError(
                "this Loader was given rank= and world_size=, so it cannot follow a world that changes; leave them out"
            )
        rank, size = rank_and_size(None, None, "world_size")
        _check_lanes(self._settings.lanes, size, self._settings.drop_last)
        settings = replace(self._settings, rank=rank, size=size)
        source = _source(self.dataset, settings)
        self._workers.close()
        self._settings, self._source = settings, source
        self._workers = WorkerGuard(rank=rank, timeout=self._timeout)
        self._first_batch_seen = False  # as on a new rank
        self._move(self._committed, resumed=True)

    def go_back(self) -> None:
        """Go back to the last commit: batches handed out since then are delivered again."""
        if self._reached != self._committed or self._uncommitted:
            self._move(self._committed, resumed=True)

    def _move(self, cursor: Cursor, *, resumed: bool) -> None:
        self._iteration += 1
        self._moves += 1
        self._reached = self._committed = cursor
        self._uncommitted.clear()
        self._agreed, self._resumed = False, resumed

    def _settle(self, step: int | None) -> None:
        if self._uncommitted or step is not None:
            self._step = self._step + 1 if step is None else step
        if self._sample_log is not None:
            unwritten = [taken for taken in self._uncommitted if not taken.step]
            for _, group in groupby(unwritten, key=lambda taken: taken.epoch):
                part = list(group)
                ids = tuple(index for taken in part for index in taken.ids)
                self._sample_log.record(replace(part[0], step=self._step, stop=part[-1].stop, ids=ids))
        self._uncommitted.clear()
        self._committed = self._reached

    def _agree(self) -> None:
        if self._agreed:
            return
        settings, at = self._settings, self._reached
        session = None
        if self._check and ranks_can_compare(settings.size):
            shared = {
                "length": -1 if self._source.length is None else self._source.length,
                "batch_size": settings.batch_size,
                "seed": mixed(at.seed),  # which fits into 64 bits
                "epoch": at.epoch,
                "committed": at.committed,
                "shuffle": settings.shuffle,
                "drop_last": settings.drop_last,
                "lanes": settings.lanes or 0,
            }
            newest = -1 if self._sample_log is None else self._sample_log.newest()
            session = 1 + check_settings(shared, settings.rank, newest)
        if self._sample_log is not None:
            self._sample_log.begin(at, settings.rank, settings.size, session=session, resumed=self._resumed)
        self._agreed = True

    def _look_at_first(self, batch: Any) -> None:
        if not self._first_batch_seen:
            self._first_batch_seen = True
            if self._check and ranks_can_compare(self._settings.size):
                check_first_batch(batch)


class Endless(Iterator[Batch]):
    """What `Loader.endless` returns. Not a generator, which would end after an error, such as the loss of a rank."""

    def __init__(self, loader: Loader[Batch]) -> None:
        self._loader = loader
        self._epoch: Iterator[Batch] | None = None
        self._moves = -1  # `_moves` of the loader when this epoch began

    def __next__(self) -> Batch:
        loader = self._loader
        if self._moves != loader._moves:
            self._epoch = None
        try:
            if self._epoch is not None:
                return next(self._epoch)
        except StopIteration:
            self._epoch = None
        except BaseException:
            self._epoch = None
            raise
        begun = loader._reached
        epoch, self._moves = iter(loader), loader._moves
        for batch in epoch:
            self._epoch = epoch
            return batch
        if begun.committed == 0:
            raise UsageError(f"epoch {begun.epoch} had no batch for this rank; expected at least one per epoch")
        return next(self)


def _check_lanes(lanes: int | None, size: int, drop_last: bool) -> None:
    if lanes is None:
        return
    check_integer("lanes", lanes, 1)
    if lanes < size:
        raise UsageError(
            f"lanes={lanes} is smaller than the world of {size} ranks, so some would get nothing; expected at least "
            f"{size} lanes, or start fewer ranks"
        )
    if not drop_last:
        raise UsageError(
            f"lanes={lanes} and drop_last=False contradict each other: lanes have equal weight, so a last batch that "
            f"is not full cannot be divided among them; leave out drop_last"
        )


def _source(dataset: Any, settings: DealSettings) -> IndexedSource | StreamSource:
    if isinstance(dataset, IterableDataset):
        return StreamSource(dataset, settings)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"dataset must have a length and indices, or be an IterableDataset, got {type(dataset).__name__}, "
            f"which has no {'__getitem__' if isinstance(dataset, Sized) else '__len__'}"
        )
    length = len(dataset)
    if length < settings.size and settings.lanes is None:
        raise UsageError(
            f"the dataset has {length} samples, fewer than the {settings.size} ranks; expected at least one for each: "
            f"start fewer ranks, or use more data"
        )
    if settings.drop_last and length < settings.global_batch:
        parts, remedy = ("ranks", "drop_last=False") if settings.lanes is None else ("lanes", "fewer lanes")
        raise UsageError(
            f"the dataset has {length} samples, fewer than one global batch of {settings.global_batch} "
            f"(batch_size={settings.batch_size} for each of {settings.parts} {parts}), and drop_last=True drops a "
            f"batch that is not full; use a smaller batch_size, or {remedy}"
        )
    return IndexedSource(dataset, length, settings)  # type: ignore[arg-type]  # a list will do, as it does for torch
