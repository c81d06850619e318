"""Fields of settings that command lines show."""

from dataclasses import field
from typing import Any


def option(default: Any, about: str) -> Any:
    """A field that command lines show with the text `about`."""
    return field(default=default, metadata={"about": about})
