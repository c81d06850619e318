"""torch's DistributedSampler, with a world that may come from the environment, and a position to resume from."""

import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data.cursor import SAMPLER_FIELDS, check_integer, check_state
from paceline.data.rank_checks import rank_and_size
from paceline.errors import UsageError
from paceline.in_use import uses

T_co = TypeVar("T_co", covariant=True)
_CHUNK = 1 << 16  # the number of indices that are Python integers at a time


class DistributedSampler(TorchDistributedSampler[T_co]):
    """Distributes the indices of `dataset` over ranks, in exactly the order of torch's class of this name.

    `num_replicas` and `rank` come from the process group; before there is one, from the launcher's environment (a
    world of one without a launcher). Call `set_epoch` before each epoch, otherwise every epoch has the same order.

    With `exactly_once=True` no index is repeated or dropped to make the parts even: each index goes to one
    rank, and some ranks get one less than others. That is for evaluation, where repeated samples would bias the mean.

    To stop in the middle of an epoch, count with `commit` and save `state_dict()`; it can be loaded in a world of
    another size. A `paceline.Loader` does that by itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        exactly_once: bool = False,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError(f"dataset must have a length, got {type(dataset).__name__}, which has no __len__")
        self._follows = rank is None and num_replicas is None
        rank, num_replicas = rank_and_size(rank, num_replicas, "num_replicas")
        check_integer("seed", seed)
        if exactly_once and drop_last:
            raise UsageError("exactly_once=True and drop_last=True contradict each other: choose one")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.exactly_once = exactly_once
        self._begun = 0  # the position where this pass began, or the next one begins
        self._committed = 0
        self._exhausted = False  # all of this pass has been drawn, though perhaps not used
        self._epoch_was_set = False

    def __iter__(self) -> Iterator[T_co]:
        if self._exhausted:
            if self.shuffle and not self._epoch_was_set and not self.exactly_once:
                self._warn()
            self._move(0)
        self._move(self._committed)
        own = self._rest()[self.rank :: self.num_replicas]
        for chunk in own.split(_CHUNK):
            for index in chunk.tolist():
                uses.tell(self)
                yield index
        self._exhausted = True

    def __len__(self) -> int:
        """The number of indices that this rank gets; after `load_state_dict`, those that are left."""
        return len(range(self._begun + self.rank, self._total(), self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order. Call it with the same value on all ranks, before iterating over the loader."""
        check_integer("epoch", epoch)
        if epoch != self.epoch:
            self._move(0)
        self._epoch_was_set = True
        super().set_epoch(epoch)

    def commit(self, samples: int) -> None:
        """Count `samples` more samples as used by every rank, usually the size of one batch.

        Only the training loop can count them: a DataLoader prefetches indices.
        """
        uses.tell(self)
        check_integer("samples", samples, lowest=0)
        self._committed += operator.index(samples) * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, and how many samples of it all ranks together have committed."""
        committed = min(self._committed, self._length())
        return {"seed": self.seed, "epoch": self.epoch, "committed": committed, "length": self._length()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, in a world of any size: the next iteration yields what is left of that epoch."""
        check_state(state, SAMPLER_FIELDS, "DistributedSampler")
        if state["length"] != self._length():
            raise UsageError(
                f"the sampler's state is for a dataset of {state['length']} samples, this one has {self._length()}: "
                f"the same position would mean other samples"
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._move(state["committed"])
        self._epoch_was_set = True

    def follow_group(self) -> None:
        """Distribute what was not committed over the current ranks. All ranks call it after the world has changed, and
        iterate again."""
        if not self._follows:
            raise UsageError(
                "this DistributedSampler was given rank= and num_replicas=, so it cannot follow a world that changes; "
                "leave them out"
            )
        self.rank, self.num_replicas = rank_and_size(None, None, "num_replicas")
        self.go_back()

    def go_back(self) -> None:
        """Go back to the last commit: the next iteration begins there."""
        self._move(self._committed)

    def _move(self, committed: int) -> None:
        self._begun = self._committed = committed
        self._exhausted = False

    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked when it was given

    def _total(self) -> int:
        """The end of the distributed order: the dataset's length, with the rest made even as torch does."""
        length = self._length()
        left = max(0, length - self._begun)
        if self.exactly_once:
            return length
        if self.drop_last:
            return length - left % self.num_replicas
        return length + -left % self.num_replicas

    def _rest(self) -> torch.Tensor:
        """The indices that are left for all ranks, in torch's order, 8 bytes per index."""
        length, total = self._length(), self._total()
        if self.shuffle:
            generator = torch.Generator(device="cpu")
            generator.manual_seed(self.seed + self.epoch)
            found = torch.randperm(length, generator=generator, device="cpu")
        else:
            found = torch.arange(length, device="cpu")
        if total > length:
            padding = total - length
            found = torch.cat([found, found.repeat(math.ceil(padding / length))[:padding]])
        return found[self._begun : total]

    def _warn(self) -> None:
        self._epoch_was_set = True  # warn once
        warnings.warn(
            f"rank {self.rank} of {self.num_replicas}: the sampler begins another epoch in the order of the "
            f"previous one, because set_epoch() was never called; call sampler.set_epoch(epoch) before each epoch",
            UserWarning,
            stacklevel=3,
        )
