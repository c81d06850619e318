"""The parts of the state: where its tensors are, and which of their elements each step compares."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from paceline.errors import UsageError

# A cut inside a tensor is a multiple of this: a part that begins there can be read as wide integers.
ALIGN_BYTES = 64

# Returns the tensor that is there now, or None if there is none any more. It is called with True when the beginning of
# that tensor is compared, and with False otherwise.
Locator = Callable[[bool], torch.Tensor | None]
NamedState = Sequence[tuple[str, torch.Tensor | Locator]]
OptimizerRef = weakref.ref[Optimizer]
Path = tuple[Any, ...]  # the keys and indices that lead to a tensor in the state of one parameter


def optimizer_tensors(optimizer: OptimizerRef, names: Mapping[int, str]) -> Iterator[tuple[str, Locator]]:
    """Where an optimizer keeps its tensors for these parameters, which are named by their ids.

    It may replace them in any step. Nothing in here keeps it alive.
    """
    alive = optimizer()
    for param, state in () if alive is None else alive.state.items():
        if isinstance(state, dict) and (name := names.get(id(param))) is not None:
            for path in _paths(state):
                yield f"{'.'.join(map(str, path))} of {name}", partial(_find, optimizer, param, path)


def _find(optimizer: OptimizerRef, param: torch.Tensor, path: Path, _: bool) -> torch.Tensor | None:
    """The optimizer's value at `path` now, if it is a tensor."""
    alive = optimizer()
    found: Any = None if alive is None else alive.state.get(param)
    try:
        for key in path:
            found = found[key]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, torch.Tensor) else None


def _paths(state: Any, before: Path = ()) -> Iterator[Path]:
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            yield (*before, key)
        elif isinstance(value, dict | list | tuple):
            yield from _paths(value, (*before, key))


def cut(metadata: Sequence[tuple[int, int]], every: int) -> list[list[tuple[int, int, int]]]:
    """For (elements, bytes of an element) of each tensor: what each part holds, as (tensor, begin, end)."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(
            f"every: expected the number of steps in which the whole state is compared, 1 or more, got {every!r}"
        )
    total = sum(numel * itemsize for numel, itemsize in metadata)
    borders = [total * number // every for number in range(1, every)]
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(every)]
    at = number = 0  # bytes before this tensor; the part in which it begins
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
