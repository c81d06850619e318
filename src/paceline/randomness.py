"""Random number generators of this process: seeded from several numbers, saved, and put back."""

import hashlib
import operator
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def mixed(*numbers: int) -> int:
    """One number of 63 bits made of several, so that (seed 0, epoch 1) is unrelated to (seed 1, epoch 0)."""
    text = "/".join(str(operator.index(number)) for number in numbers)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_host(number: int) -> None:
    """Seed the generators of the CPU: torch's, Python's, and NumPy's if it is loaded."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number & 0xFFFFFFFF)


def seed_all(number: int, device: torch.device) -> None:
    """The same, and the generator of `device`."""
    seed_host(number)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(number)


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """The generators of this rank: Python's, torch's for the CPU and one CUDA device, NumPy's if loaded.

    They differ between ranks: save them as `PerRank(rng_state())`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state("cuda" if device is None or device.type != "cuda" else device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Continue where `rng_state` was taken. Generators that this machine lacks are skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], "cuda" if device is None or device.type != "cuda" else device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


class Kept:
    """The generators as they are now, to be put back.

    Several may be kept at a time and may end in any order, as with two loops that zip() runs side by side. What is put
    back at the end is what the first of them found.

    The end of an abandoned loop may be noticed late, because an error that is kept keeps the loop alive. If other code
    has seeded torch's generator by then, nothing is put back, so that the result does not depend on when Python
    collects garbage.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._found = [(rng_state(device), device)]
        self._ends = sys.is_finalizing  # when Python ends, modules may be gone, and so may the generators
        self._device = device or torch.device("cpu")
        self._seeds = False  # whether this object has seeded them
        self._open: list[Kept] = _here.__dict__.setdefault("open", [])  # of this thread, oldest first
        self._open[:] = [kept for kept in self._open if not kept._overtaken()]
        self._open.append(self)

    def seed(self, number: int) -> None:
        """Seed the generators until they are put back."""
        seed_all(number, self._device)
        self._seeds, _here.seeded = True, number

    def _overtaken(self) -> bool:
        return self._seeds and torch.default_generator.initial_seed() != _here.__dict__.get("seeded")

    def put_back(self, *, late: bool = False) -> None:
        """Put the generators back, once; further calls do nothing. `late`: the loop may have been left long ago."""
        if self not in self._open or self._ends():
            return
        if late and self._overtaken():
            self._open.remove(self)
            return
        place = self._open.index(self)
        del self._open[place]
        if place < len(self._open):
            self._open[place]._found += self._found
            return
        for state, device in self._found:
            set_rng_state(state, device)


_here = threading.local()


@contextmanager
def put_back(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators at the end of the block."""
    kept = Kept(device)
    try:
        yield
    finally:
        kept.put_back()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
