"""Optimizer steps with a closure."""

import functools
from collections.abc import Callable
from typing import Any


def with_closure(
    args: Any, kwargs: Any, then: Callable[[], object], first: Callable[[], object] = lambda: None
) -> tuple[Any, Any]:
    """The arguments of an optimizer's step, with a closure that calls `first` first, and `then` before it returns."""
    given = kwargs["closure"] if "closure" in kwargs else args[1]

    @functools.wraps(given)
    def closure(*inputs: Any, **named: Any) -> Any:
        first()
        result = given(*inputs, **named)
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
