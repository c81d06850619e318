"""Fields of settings that appear as command line options, and the check of their values."""

import math
from dataclasses import Field, field, fields
from typing import Any

from paceline.errors import UsageError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "several names"}


def option(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    group: str = "",
) -> Any:
    """A field that appears on command lines with the help text `about`, in the `group` of the same name.

    Values must be at least `low` and at most `high`, or among `choices`, where these are given.
    """
    return field(default=default, metadata={"about": about, "bounds": (low, high), "choices": choices, "group": group})


def check_fields(settings: Any, error: type[UsageError] = UsageError) -> None:
    """Raise `error` for the first field whose value has another type than its default, or is not allowed."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if expected := _unmet(value, item):
            raise error(f"{item.name}={value!r}: expected {expected}")


def _unmet(value: Any, item: "Field[Any]") -> str:
    """The requirement that `value` does not meet; empty if it is valid."""
    kind: Any = type(item.default)
    low, high = item.metadata["bounds"]
    choices = item.metadata["choices"]
    if type(value) is not kind and not (kind is float and type(value) is int):
        return KINDS[kind]
    if low is not None and not low <= value <= (math.inf if high is None else high):  # also when it is not a number
        return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
    return f"one of {', '.join(choices)}" if choices and value not in choices else ""
