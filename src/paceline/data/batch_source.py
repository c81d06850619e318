"""The common part of indexed datasets and streams as sources of a rank's batches."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from paceline.blocks import lanes_of
from paceline.data.cursor import LOADER_FIELDS, Cursor, check_state
from paceline.data.workers import WorkerGuard
from paceline.errors import UsageError
from paceline.randomness import mixed


@dataclass(frozen=True, slots=True)
class DealSettings:
    """How a dataset is dealt to ranks. `options` go to torch's DataLoader as they are."""

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
        """The number of parts of a global batch: lanes, or ranks."""
        return self.lanes or self.size

    @property
    def own(self) -> range:
        """The parts of this rank."""
        return lanes_of(self.rank, self.size, self.parts)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.parts

    def slice_of(self, samples: int) -> tuple[int, int]:
        """The range of this rank's parts in a global batch; the last batch may have fewer samples."""
        # Rounded up: if there are fewer samples than parts, the first parts get them.
        start, stop = (-(-samples * part // self.parts) for part in (self.own.start, self.own.stop))
        return start, stop

    def batches(self, samples: int) -> int:
        """The number of batches that this rank gets out of `samples` samples."""
        full, tail = divmod(samples, self.global_batch)
        if self.drop_last:
            return full
        start, stop = self.slice_of(tail)
        return full + (stop > start)

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """The collate function: the user's, or one that collates each lane. None: torch's own."""
        given: Callable[[list[Any]], Any] | None = self.options["collate_fn"]
        return given if self.lanes is None else _CollateLanes(given or default_collate, self.batch_size)


class _CollateLanes:
    """Collates the samples of several lanes, one microbatch per lane. A class, because it is sent to workers."""

    def __init__(self, collate: Callable[[list[Any]], Any], batch_size: int) -> None:
        self._collate = collate
        self._batch_size = batch_size

    def __call__(self, samples: list[Any]) -> list[Any]:
        begins = range(0, len(samples), self._batch_size)
        return [self._collate(samples[begin : begin + self._batch_size]) for begin in begins]


class Window(NamedTuple):
    """One global batch: its range in the epoch, which of its samples are this rank's, and their batch."""

    start: int
    stop: int
    ids: list[int]
    batch: Any


class BatchSource(ABC):
    """The source of a rank's batches. `length` is None for a stream."""

    def __init__(self, settings: DealSettings, length: int | None) -> None:
        self.length = length
        self._settings = settings
        self._at = Cursor()
        self._generator = torch.Generator(device="cpu")

    def windows(self, cursor: Cursor, workers: WorkerGuard) -> Iterator[Window]:
        """This rank's batches of the cursor's epoch, from the cursor on."""
        self._at = cursor
        # Workers get their seeds from a separate generator: loading must not change the model's random numbers.
        self._generator.manual_seed(mixed(cursor.seed, cursor.epoch, cursor.committed, self._settings.rank))
        for window in self._windows(workers):
            self._at = Cursor(cursor.seed, cursor.epoch, window.stop)
            yield window

    def read_position(self, state: Mapping[str, Any]) -> Cursor:
        """The cursor of a Loader's state. Raises UsageError if it would mean other samples here."""
        check_state(state, LOADER_FIELDS, "Loader")
        for name, here in (("length", self.length), ("shuffle", self._settings.shuffle)):
            if state[name] != here:
                raise UsageError(
                    f"the Loader's state was saved with {name}={state[name]!r}, but here it is {here!r}: the same "
                    f"position would mean other samples. Resume with the dataset and the settings it was saved with"
                )
        cursor = Cursor(*(operator.index(state[name]) for name in ("seed", "epoch", "committed")))
        if self.length is not None and cursor.committed > self.length:
            raise UsageError(
                f"the Loader's state has committed={cursor.committed}, expected at most length={self.length}: no epoch "
                f"has more samples"
            )
        if cursor.committed and self.fingerprint(cursor) != state["order"]:
            raise UsageError(
                f"the Loader's state was saved in the middle of epoch {cursor.epoch}, whose order is different here "
                f"although seed and length are equal: another version of torch draws other permutations. Resume with "
                f"the version it was saved with, or start the next epoch with set_epoch({cursor.epoch + 1})"
            )
        return cursor

    @abstractmethod
    def _windows(self, workers: WorkerGuard) -> Iterator[Window]: ...

    @abstractmethod
    def fingerprint(self, cursor: Cursor) -> str:
        """A text that identifies the order of the cursor's epoch."""

    @abstractmethod
    def build(self) -> DataLoader[Any]:
        """A DataLoader whose iterations begin at the loop's position."""

    @abstractmethod
    def describe(self, batches: range) -> str:
        """The samples in those batches, which are counted from the loop's position."""
