"""Which part of the state is compared at which step, so that all of it is within a few steps."""

from collections.abc import Callable, Sequence

import torch

from paceline.agree.pieces import Piece
from paceline.agree.word import readable
from paceline.errors import UsageError

# A cut inside a tensor is a multiple of this: what begins there can be read as wide integers.
ALIGN_BYTES = 64

Named = Sequence[tuple[str, torch.Tensor]]
Current = Callable[[torch.Tensor, int], torch.Tensor]


class Rotation:
    """Cuts a state into `every` parts of about equal bytes: `part(step)` is what is compared at that step.

    The cuts follow from names, shapes and dtypes alone, so they are equal on all ranks. A tensor that is named twice
    (tied weights) is taken once. What has no plain memory to compare, such as a sparse tensor, is left out.
    """

    def __init__(self, named: Named, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(
                f"every: expected the number of steps in which the whole state is compared, 1 or more, got {every!r}"
            )
        self._every = every
        self._named: list[tuple[str, torch.Tensor]] = []
        self._parts: list[list[tuple[int, int, int]]] = []
        self.renew(named)

    def renew(self, named: Named) -> None:
        """Take another list: an optimizer has made its moments, or a checkpoint was loaded.

        All ranks do it before the same step. It is cheap, so it may be done whenever something could have changed.
        """
        seen: set[int] = set()
        kept = []
        for name, tensor in named:
            if readable(tensor) and id(tensor) not in seen:
                kept.append((name, tensor))
            seen.add(id(tensor))
        changed = [_metadata(tensor) for _, tensor in kept] != [_metadata(tensor) for _, tensor in self._named]
        self._named = kept
        if changed or not self._parts:
            self._parts = cut([_metadata(tensor) for _, tensor in kept], self._every)

    def part(self, step: int, current: Current = lambda tensor, _: tensor) -> list[Piece]:
        """What is compared at `step`. `current` gives the tensor that stands where the listed one stood, if that was
        replaced since, for a piece that begins at `begin`."""
        pieces = []
        for index, begin, end in self._parts[step % self._every]:
            name, tensor = self._named[index]
            now = current(tensor, begin)
            if now is not tensor and now.shape == tensor.shape and now.dtype is tensor.dtype and readable(now):
                self._named[index] = name, now
            pieces.append(Piece(*self._named[index], begin, end))
        return pieces

    def whole(self) -> list[Piece]:
        """All of the state, a piece for each tensor."""
        return [Piece.whole(name, tensor) for name, tensor in self._named]


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


def _metadata(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.numel(), tensor.dtype.itemsize
