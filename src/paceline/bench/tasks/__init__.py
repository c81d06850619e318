"""What a worker does between the conductor's messages. Each task lives in its own module, which loads torch."""

from collections.abc import Callable
from typing import Any

Barrier = Callable[[], None]  # returns when all ranks of the contender have called it


class Task:
    """One rank's part of a measurement, made as `Task(spec, contender's name, rank, size)`. Messages and answers are
    plain values, as `bench/messages.py` sends them."""

    def bind(self) -> int:
        """A port of this rank, which is passed to `build` on all ranks; 0 if it needs none."""
        return 0

    def build(self, ports: list[int]) -> dict[str, Any]:
        """Prepare, together with the other ranks. Answers with facts for the report."""
        raise NotImplementedError

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        """Measure."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Facts that are known at the end."""
        return {}

    def close(self) -> None:
        """Release everything."""
