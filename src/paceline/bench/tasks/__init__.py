"""What a worker does between the conductor's messages."""

from collections.abc import Callable
from typing import Any, Protocol

LineUp = Callable[[], None]  # returns when all ranks of the contender have called it


class Task(Protocol):
    """One rank's part of a measurement. Messages and answers are JSON objects."""

    def meet(self) -> int:
        """A port of this rank for `build` of all ranks, or 0 when it needs none."""
        ...

    def build(self, ports: list[int]) -> dict[str, Any]:
        """Prepare, together with the other ranks. Answers with facts for the report."""
        ...

    def run(self, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
        """Measure."""
        ...

    def finish(self) -> dict[str, Any]:
        """Facts that are known at the end."""
        ...

    def close(self) -> None: ...
