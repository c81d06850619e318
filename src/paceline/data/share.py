"""`Share`: the sample indices of one batch of one rank, and random numbers that belong to samples."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.data.order import mixed


class Share(list[int]):
    """What a rank takes of one global batch, which reaches from `start` to `stop` in the order of its epoch.

    A DataLoader hands it to whoever fetches the samples, often in a worker process. Going through it there seeds the
    generators before each sample, with `key` and the sample's index, so the random numbers that `dataset[i]` draws do
    not depend on which worker or rank fetches it, nor on what was fetched before. Without a `key` it does not.
    """

    def __init__(self, ids: Sequence[int], start: int, stop: int, key: int | None = None) -> None:
        super().__init__(ids)
        self.start = start
        self.stop = stop
        self.key = key

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if self.key is not None:
                seed_generators(mixed(self.key, index))
            yield index

    def __reduce__(self) -> tuple[Any, ...]:
        # As usual, list items would be sent by iterating, which seeds.
        return Share, (self[:], self.start, self.stop, self.key)


def seed_generators(number: int) -> None:
    """Seed the generators of the CPU that datasets draw from; those of devices belong to the model."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number & 0xFFFFFFFF)


@contextmanager
def own_numbers(key: int) -> Iterator[None]:
    """Inside, the generators of the CPU start from `key`; afterwards they are as they were."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy else None
    seed_generators(key)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numbers)
