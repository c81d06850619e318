"""`Share`: the sample indices of one batch of one rank, and random numbers that belong to samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.randomness import mixed, rng_state, seed_host, set_rng_state


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
                seed_host(mixed(self.key, index))  # generators of devices belong to the model
            yield index

    def __reduce__(self) -> tuple[Any, ...]:
        # As usual, list items would be sent by iterating, which seeds.
        return Share, (self[:], self.start, self.stop, self.key)


@contextmanager
def own_numbers(key: int) -> Iterator[None]:
    """Inside, the generators of the CPU start from `key`; afterwards they are as they were."""
    state = rng_state()
    state.pop("cuda", None)  # what a dataset draws there stays drawn: it was not seeded here
    seed_host(key)
    try:
        yield
    finally:
        set_rng_state(state)
