"""Where the tensors of a state stand: an optimizer may replace its own, and is let go when its user lets it go."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

# Asked for the tensor that stands there now, with True when a step begins. None: there is none any more.
Home = Callable[[bool], torch.Tensor | None]


class InOptimizer:
    """The place of one tensor in the state of an optimizer, of which it keeps nothing alive."""

    __slots__ = ("_optimizer", "_param", "_path")

    def __init__(self, optimizer: "weakref.ref[Optimizer]", param: torch.Tensor, path: tuple[Any, ...]) -> None:
        self._optimizer = optimizer
        self._param = param
        self._path = path

    def __call__(self, _: bool) -> torch.Tensor | None:
        optimizer = self._optimizer()
        found: Any = None if optimizer is None else optimizer.state.get(self._param)
        try:
            for key in self._path:
                found = found[key]
        except (KeyError, IndexError, TypeError):  # it keeps something else there now
            return None
        return found if isinstance(found, torch.Tensor) else None


def homes_in(optimizer: "weakref.ref[Optimizer]", names: Mapping[int, str]) -> Iterator[tuple[str, Home]]:
    """Every tensor in the state of an optimizer that belongs to one of these parameters, named by their ids."""
    living = optimizer()
    for param, state in () if living is None else living.state.items():
        if isinstance(state, dict) and (name := names.get(id(param))) is not None:
            for path in _paths(state):
                yield f"{'.'.join(map(str, path))} of {name}", InOptimizer(optimizer, param, path)


def _paths(state: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            yield (*before, key)
        elif isinstance(value, dict | list | tuple):
            yield from _paths(value, (*before, key))
