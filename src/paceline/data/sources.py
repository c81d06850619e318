"""Where a rank's batches come from: a dataset with indices, or a stream. Both answer with windows."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.blocks import lanes_of
from paceline.data.order import Cursor, cuts, fingerprint, order
from paceline.data.share import Share, own_numbers
from paceline.data.stream import Window, Windows
from paceline.data.workers import Feed
from paceline.randomness import mixed

_END = object()
_NAMED = 8  # samples that a message lists


@dataclass(frozen=True, slots=True)
class Terms:
    """How a dataset is dealt. `options` go to torch's DataLoader as they are."""

    batch_size: int
    rank: int
    size: int
    shuffle: bool
    drop_last: bool
    reseed: bool
    options: Mapping[str, Any]
    lanes: int | None = None

    @property
    def parts(self) -> int:
        """Into how many parts a global batch is cut: lanes, or ranks."""
        return self.lanes or self.size

    @property
    def own(self) -> range:
        """Those of them that are this rank's."""
        return lanes_of(self.rank, self.size, self.parts)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.parts

    def slice_of(self, samples: int) -> tuple[int, int]:
        """From where to where this rank's parts reach in a global batch, which may be a last one of fewer samples."""
        edges = cuts(samples, self.parts)
        return edges[self.own.start], edges[self.own.stop]

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of samples: the user's function, or that for each lane. None: torch's own."""
        given: Callable[[list[Any]], Any] | None = self.options["collate_fn"]
        return given if self.lanes is None else _Micros(given or default_collate, self.batch_size)

    def batches(self, samples: int) -> int:
        """How many batches this rank gets of so many samples."""
        full, tail = divmod(samples, self.global_batch)
        if self.drop_last:
            return full
        start, stop = self.slice_of(tail)
        return full + (stop > start)


class _Micros:
    """Collates the samples of several lanes, each lane by itself. Workers get it too, so it is no closure."""

    def __init__(self, collate: Callable[[list[Any]], Any], batch_size: int) -> None:
        self._collate = collate
        self._batch_size = batch_size

    def __call__(self, samples: list[Any]) -> list[Any]:
        begins = range(0, len(samples), self._batch_size)
        return [self._collate(samples[begin : begin + self._batch_size]) for begin in begins]


class Indexed:
    """A dataset with indices and a length."""

    def __init__(self, dataset: Dataset[Any], length: int, terms: Terms) -> None:
        self.length: int | None = length
        self._dataset = dataset
        self._samples = length
        self._terms = terms
        self._at = Cursor()
        self._order: tuple[int, int, torch.Tensor] | None = None
        self._generator = torch.Generator(device="cpu")

    def windows(self, cursor: Cursor, feed: Feed) -> Iterator[Window]:
        """What this rank gets of the cursor's epoch, from there on."""
        self._at = cursor
        # Workers draw their seeds from a generator of ours: the model's own numbers must not depend on loading.
        self._generator.manual_seed(mixed(cursor.seed, cursor.epoch, cursor.committed, self._terms.rank))
        batches, shares = feed.batches(self), self.shares(cursor)
        while True:
            share = next(shares, None)
            with self._numbers(share):
                batch = next(batches, _END)
            if share is None or batch is _END:
                return
            self._at = Cursor(cursor.seed, cursor.epoch, share.stop)
            yield Window(share.start, share.stop, share[:], batch)

    def fingerprint(self, cursor: Cursor) -> str:
        """What tells the order of the cursor's epoch from another."""
        return fingerprint(self._ordered(cursor))

    def _numbers(self, share: Share | None) -> AbstractContextManager[None]:
        """Without workers samples are fetched here, and must not use up the random numbers of the training loop."""
        if share is None or share.key is None or self._terms.options["num_workers"]:
            return nullcontext()
        return own_numbers(mixed(share.key, share.start, self._terms.rank))

    def shares(self, cursor: Cursor | None = None) -> Iterator[Share]:
        cursor = self._at if cursor is None else cursor
        terms, samples = self._terms, self._ordered(cursor)
        key = mixed(cursor.seed, cursor.epoch) if terms.reseed else None
        for start in range(cursor.committed, self._samples, terms.global_batch):
            stop = min(start + terms.global_batch, self._samples)
            if terms.drop_last and stop - start < terms.global_batch:
                return
            first, last = terms.slice_of(stop - start)
            if last > first:
                yield Share(samples[start + first : start + last].tolist(), start, stop, key)

    def _ordered(self, cursor: Cursor) -> torch.Tensor:
        if self._order is None or self._order[:2] != (cursor.seed, cursor.epoch):
            self._order = None  # not two at a time: they may be large
            samples = order(cursor.seed, cursor.epoch, self._samples, shuffle=self._terms.shuffle)
            self._order = (cursor.seed, cursor.epoch, samples)
        return self._order[2]

    def build(self) -> DataLoader[Any]:
        """A DataLoader that begins every iteration where the loop is."""
        dealer: Any = _Dealer(self)
        options = {**self._terms.options, "collate_fn": self._terms.collate()}
        return DataLoader(self._dataset, batch_sampler=dealer, generator=self._generator, **options)

    def describe(self, batches: range) -> str:
        """Which samples are in those batches; they are counted from where the loop is."""
        shares = islice(self.shares(), batches.start, batches.stop, batches.step)
        ids = [index for share in shares for index in share[:]]
        if not ids:
            return "nothing"
        few = ", ".join(map(str, ids[:_NAMED])) + (", …" if len(ids) > _NAMED else "")
        return f"{len(ids)} samples between indices {min(ids)} and {max(ids)} ({few})"


class _Dealer:
    """An Indexed as a batch sampler."""

    def __init__(self, source: Indexed) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Share]:
        return self._source.shares()


class Streamed:
    """A dataset that can only be iterated."""

    def __init__(self, dataset: IterableDataset[Any], terms: Terms) -> None:
        self.length: int | None = None
        options = dict(terms.options)
        del options["collate_fn"]
        self._windows = Windows(
            dataset,
            terms.batch_size,
            terms.own,
            terms.parts,
            drop_last=terms.drop_last,
            collate=terms.collate() or default_collate,
            shared=options["persistent_workers"],
        )
        self._options = options
        self._rank = terms.rank
        self._window = terms.global_batch
        self._at = Cursor()
        self._generator = torch.Generator(device="cpu")

    def windows(self, cursor: Cursor, feed: Feed) -> Iterator[Window]:
        """What this rank gets of the cursor's epoch, from there on. What lies before is read and dropped."""
        self._at = cursor
        self._windows.begin_at(cursor.epoch, cursor.committed)
        self._generator.manual_seed(mixed(cursor.seed, cursor.epoch, cursor.committed, self._rank))
        for window in feed.batches(self):
            # Told to the stream only when workers are started anew: those of now may not have read it yet.
            self._at = Cursor(cursor.seed, cursor.epoch, window.stop)
            yield window

    def fingerprint(self, cursor: Cursor) -> str:
        """A stream has the order it has."""
        return ""

    def build(self) -> DataLoader[Any]:
        """A DataLoader whose next iteration begins where the loop is."""
        self._windows.begin_at(self._at.epoch, self._at.committed)
        return DataLoader(
            self._windows, batch_size=None, collate_fn=as_it_is, generator=self._generator, **self._options
        )

    def describe(self, batches: range) -> str:
        """Which elements are in those windows; they are counted from where the loop is."""
        start = self._at.committed + batches.start * self._window
        return f"elements from {start} on"


def as_it_is(window: Any) -> Any:
    """Windows hold batches that are collated already."""
    return window
