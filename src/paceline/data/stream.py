"""Streams: datasets that can only be iterated, distributed over ranks and over the workers of a rank."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.data.batch_source import BatchSource, DealSettings, Window
from paceline.data.cursor import Cursor
from paceline.data.rank_checks import rank_and_size
from paceline.data.workers import WorkerGuard

T = TypeVar("T")


def shard(
    iterable: Iterable[T], rank: int | None = None, world_size: int | None = None, *, start: int = 0
) -> Iterator[T]:
    """The elements of `iterable` that belong to this rank: element i goes to rank i mod `world_size`.

    Inside a DataLoader's worker, the rank's elements are distributed over its workers in turn. The first `start`
    elements are skipped on all ranks. Every rank, and every worker, still reads the whole iterable and drops the
    elements of the others, so an iterable that is expensive to read should be sharded at its source.
    """
    rank, world_size = rank_and_size(rank, world_size, "world_size")
    info = get_worker_info()
    if info is not None:
        rank, world_size = rank + world_size * info.id, world_size * info.num_workers
    for index, element in enumerate(elements_from(iterable, start), start):
        if index % world_size == rank:
            yield element


def elements_from(iterable: Iterable[T], start: int) -> Iterator[T]:
    """The elements of `iterable` from `start` on: by its own `iter_from(start)`, else by reading and dropping."""
    if start and hasattr(iterable, "iter_from"):
        found: Iterator[T] = iter(iterable.iter_from(start))
        return found
    return islice(iter(iterable), start, None)


class StreamWindows(IterableDataset[Window]):
    """The global batches of a stream as one rank sees them; window k is made by worker k mod the number of workers."""

    def __init__(self, stream: Iterable[Any], settings: DealSettings) -> None:
        self._stream = stream
        self._window = settings.global_batch
        self._own = settings.own  # this rank's parts; element i is in part i mod `parts`
        self._parts = settings.parts
        self._drop_last = settings.drop_last
        self._collate: Callable[[list[Any]], Any] = settings.collate() or default_collate
        # Epoch and first element. In shared memory, because persistent workers read it again at every epoch.
        self._from = torch.zeros(2, dtype=torch.int64, device="cpu")
        if settings.options["persistent_workers"]:
            self._from.share_memory_()

    def begin_at(self, cursor: Cursor) -> None:
        """Choose what the next iteration yields."""
        self._from[0], self._from[1] = cursor.epoch, cursor.committed

    def __iter__(self) -> Iterator[Window]:
        epoch, start = self._from.tolist()
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        elements = enumerate(elements_from(self._stream, start), start)
        for number in count():
            seen = 0
            taken: dict[int, list[tuple[int, Any]]] = {part: [] for part in self._own}
            for index, element in islice(elements, self._window):
                seen += 1
                if number % workers == worker and (part := index % self._parts) in taken:
                    taken[part].append((index, element))
            mine = [pair for pairs in taken.values() for pair in pairs]  # in the order of parts
            first = start + number * self._window
            if mine and not (self._drop_last and seen < self._window):
                samples = [element for _, element in mine]
                yield Window(first, first + seen, [index for index, _ in mine], self._collate(samples))
            if seen < self._window:
                return


class StreamSource(BatchSource):
    """A dataset that can only be iterated. Elements before the cursor are read and dropped."""

    def __init__(self, dataset: IterableDataset[Any], settings: DealSettings) -> None:
        super().__init__(settings, None)
        self._stream = StreamWindows(dataset, settings)

    def _windows(self, workers: WorkerGuard) -> Iterator[Window]:
        self._stream.begin_at(self._at)
        return workers.batches(self.build, self.describe)

    def fingerprint(self, cursor: Cursor) -> str:
        return ""  # a stream defines its own order

    def build(self) -> DataLoader[Any]:
        options = {**self._settings.options, "collate_fn": keep}
        return DataLoader(self._stream, batch_size=None, generator=self._generator, **options)

    def describe(self, batches: range) -> str:
        return f"elements from {self._at.committed + batches.start * self._settings.global_batch} on"


def keep(window: Window) -> Window:
    """Return the window: its batch is already collated."""
    return window
