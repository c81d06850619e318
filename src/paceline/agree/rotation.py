"""Which part of the state is compared at which step, so that all of it is within a few steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.agree.homes import Home
from paceline.agree.pieces import Piece
from paceline.agree.word import readable
from paceline.errors import UsageError

# A cut inside a tensor is a multiple of this: what begins there can be read as wide integers.
ALIGN_BYTES = 64

Listed = Sequence[tuple[str, torch.Tensor | Home]]


class Gone(LookupError):
    """A tensor that was listed exists no more, or has become something else."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the state, as it was listed."""

    name: str
    home: torch.Tensor | Home
    shape: torch.Size
    dtype: torch.dtype

    @property
    def metadata(self) -> tuple[int, int]:
        return self.shape.numel(), self.dtype.itemsize

    def now(self, *, begins: bool) -> torch.Tensor | None:
        """What stands there now, unless it has become something else."""
        tensor = _at(self.home, begins=begins)
        if tensor is None or tensor.shape != self.shape or tensor.dtype is not self.dtype or not readable(tensor):
            return None
        return tensor


class Rotation:
    """Cuts a state into `every` parts of about equal bytes: `part(step)` is what is compared at that step.

    The cuts follow from names, shapes and dtypes alone, so they are equal on all ranks. A tensor that is named twice
    (tied weights) is taken once. What has no plain memory to compare, such as a sparse tensor, is left out.
    """

    def __init__(self, named: Listed, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(
                f"every: expected the number of steps in which the whole state is compared, 1 or more, got {every!r}"
            )
        self._every = every
        self._entries: list[_Entry] = []
        self._parts: list[list[tuple[int, int, int]]] = []
        self.renew(named)

    def renew(self, named: Listed) -> None:
        """Take another list: an optimizer has made its moments, or a checkpoint was loaded.

        All ranks do it before the same step. It is cheap, so it may be done whenever something could have changed.
        """
        seen: set[int] = set()
        kept = []
        for name, home in named:
            tensor = _at(home, begins=False)
            if tensor is not None and readable(tensor) and id(tensor) not in seen:
                kept.append(_Entry(name, home, tensor.shape, tensor.dtype))
            seen.add(id(tensor))
        changed = [entry.metadata for entry in kept] != [entry.metadata for entry in self._entries]
        self._entries = kept
        if changed or not self._parts:
            self._parts = cut([entry.metadata for entry in kept], self._every)

    def described(self) -> str:
        """Equal on two ranks when the lists are."""
        return repr([(entry.name, tuple(entry.shape), entry.dtype) for entry in self._entries])

    def part(self, step: int) -> list[Piece]:
        """What is compared at `step`. Raises Gone when some of it is: then nothing is to be compared, until the list
        was renewed."""
        pieces = []
        for index, begin, end in self._parts[step % self._every]:
            tensor = self._entries[index].now(begins=begin == 0)
            if tensor is None:
                raise Gone(self._entries[index].name)
            pieces.append(Piece(self._entries[index].name, tensor, begin, end))
        return pieces

    def whole(self) -> list[Piece]:
        """All of the state, a piece for each tensor."""
        found = [(entry.name, entry.now(begins=False)) for entry in self._entries]
        return [Piece.whole(name, tensor) for name, tensor in found if tensor is not None]


def _at(home: torch.Tensor | Home, *, begins: bool) -> torch.Tensor | None:
    return home if isinstance(home, torch.Tensor) else home(begins)


def cut(metadata: Sequence[tuple[int, int]], every: int) -> list[list[tuple[int, int, int]]]:
    """For (elements, bytes of an element) of each tensor: what each part holds, as (tensor, begin, end)."""
    total = sum(numel * itemsize for numel, itemsize in metadata)
    borders = [total * number // every for number in range(1, every)]
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(every)]
    at = number = 0  # bytes before this tensor; the part that it begins in
    for index, (numel, itemsize) in enumerate(metadata):
        step, begin = ALIGN_BYTES // itemsize, 0
        while number < every - 1 and borders[number] < at + numel * itemsize:
            end = (borders[number] - at) // itemsize // step * step
            if end > begin:
                parts[number].append((index, begin, end))
                begin = end
            number += 1
        if numel > begin:
            parts[number].append((index, begin, numel))
        at += numel * itemsize
    return parts
