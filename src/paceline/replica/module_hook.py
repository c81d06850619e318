"""Hooks on the user's modules, which make parameters available when their module runs."""

from collections.abc import Callable
from functools import partial
from typing import Any


class ModuleHook:
    """Calls a function with some arguments. A copy of it, as in a copy of its module, does nothing."""

    def __init__(self, function: Callable[..., None], *first: Any) -> None:
        self._call = partial(function, *first)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None: ...
