"""Which backward is under way, and whether it still is."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from paceline.reducer import autograd


@dataclass(slots=True)
class Backward:
    """One backward under way."""

    task: int
    running: "weakref.ref[Callable[[], None]]"  # dead when the backward ended without its callback
    adds: bool | None  # whether it is a backward() and not an autograd.grad(), if that can be told
    syncs: bool
    alone: bool  # there is no one to reduce with: gradients stay where autograd put them
    delivered: bool = False  # some parameter got a gradient
    scale: float = 1.0  # by what gradients are multiplied on their way into a bucket

    @property
    def reduces(self) -> bool:
        """Whether the other ranks reduce with it."""
        return self.syncs and bool(self.delivered or self.adds)


class Backwards:
    """The one backward of a replica that may be under way."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self.current: Backward | None = None

    def open(self, task: int, *, syncs: bool, alone: bool) -> Backward:
        running = autograd.at_end_of_backward(self._at_end)
        self.current = Backward(task, running, autograd.adds_to_grad(), syncs, alone)
        return self.current

    def found(self, task: int) -> Backward | None:
        """The one that `task` is, or is nested in."""
        current = self.current
        return current if current is not None and (current.task == task or current.running() is not None) else None

    def failed(self) -> bool:
        """Whether it ended with an exception, so that its callback will never run."""
        return self.current is not None and self.current.running() is None

    def close(self) -> Backward | None:
        closed, self.current = self.current, None
        return closed
