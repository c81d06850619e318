"""Datasets with indices and a length, distributed over ranks, with random numbers that depend on the sample only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.batch_source import BatchSource, DealSettings, Window
from paceline.data.cursor import Cursor, fingerprint, order
from paceline.data.workers import WorkerGuard
from paceline.randomness import mixed, rng_state, seed_host, set_rng_state

_END = object()
_NAMED = 8  # samples that a message lists


class BatchIndices(list[int]):
    """The indices that a rank takes from one global batch, the range from `start` to `stop` of its epoch's order.

    A DataLoader passes it to the code that fetches the samples, often in a worker process. Iterating over it seeds the
    generators before each sample, with `key` and the sample's index, so the random numbers that `dataset[i]` draws do
    not depend on which worker or rank fetches it, nor on what was fetched before. Without a `key` nothing is seeded.
    """

    def __init__(self, ids: Sequence[int], start: int, stop: int, key: int | None = None) -> None:
        super().__init__(ids)
        self.start = start
        self.stop = stop
        self.key = key

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if self.key is not None:
                seed_host(mixed(self.key, index))  # the generators of devices belong to the model
            yield index

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickling would iterate over the items, which seeds.
        return BatchIndices, (self[:], self.start, self.stop, self.key)


class IndexedSource(BatchSource):
    """A dataset with indices and a length."""

    def __init__(self, dataset: Dataset[Any], length: int, settings: DealSettings) -> None:
        super().__init__(settings, length)
        self._dataset = dataset
        self._samples = length
        self._order: tuple[int, int, torch.Tensor] | None = None

    def _windows(self, workers: WorkerGuard) -> Iterator[Window]:
        batches, all_indices = workers.batches(self.build, self.describe), iter(self)
        while True:
            indices = next(all_indices, None)
            with self._own_random_numbers(indices):
                batch = next(batches, _END)
            if indices is None or batch is _END:
                return
            yield Window(indices.start, indices.stop, indices[:], batch)

    def fingerprint(self, cursor: Cursor) -> str:
        return fingerprint(self._ordered(cursor))

    @contextmanager
    def _own_random_numbers(self, indices: BatchIndices | None) -> Iterator[None]:
        """Without workers samples are fetched here, and must not use up the random numbers of the training loop."""
        if indices is None or indices.key is None or self._settings.options["num_workers"]:
            yield
            return
        state = rng_state()
        state.pop("cuda", None)  # a dataset's draws from that generator are kept: it was not seeded here
        seed_host(mixed(indices.key, indices.start, self._settings.rank))
        try:
            yield
        finally:
            set_rng_state(state)

    def __iter__(self) -> Iterator[BatchIndices]:
        """The batch sampler of the DataLoader: what this rank fetches, from the loop's position on."""
        cursor, settings = self._at, self._settings
        samples = self._ordered(cursor)
        key = mixed(cursor.seed, cursor.epoch) if settings.reseed else None
        for start in range(cursor.committed, self._samples, settings.global_batch):
            stop = min(start + settings.global_batch, self._samples)
            if settings.drop_last and stop - start < settings.global_batch:
                return
            first, last = settings.slice_of(stop - start)
            if last > first:
                yield BatchIndices(samples[start + first : start + last].tolist(), start, stop, key)

    def _ordered(self, cursor: Cursor) -> torch.Tensor:
        if self._order is None or self._order[:2] != (cursor.seed, cursor.epoch):
            self._order = None  # orders may be large, so only one is kept at a time
            samples = order(cursor.seed, cursor.epoch, self._samples, shuffle=self._settings.shuffle)
            self._order = (cursor.seed, cursor.epoch, samples)
        return self._order[2]

    def build(self) -> DataLoader[Any]:
        sampler: Any = self
        options = {**self._settings.options, "collate_fn": self._settings.collate()}
        return DataLoader(self._dataset, batch_sampler=sampler, generator=self._generator, **options)

    def describe(self, batches: range) -> str:
        found = islice(self, batches.start, batches.stop, batches.step)
        ids = [index for indices in found for index in indices[:]]
        if not ids:
            return "nothing"
        few = ", ".join(map(str, ids[:_NAMED])) + (", …" if len(ids) > _NAMED else "")
        return f"{len(ids)} samples between indices {min(ids)} and {max(ids)} ({few})"
