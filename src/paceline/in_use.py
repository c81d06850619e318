"""Listeners that are told when an object whose position or state belongs to a run is used.

`paceline.elastic` listens while an attempt runs: everything that an attempt uses has to be declared to it, or a new
rank would not have its state. The objects that are used know nothing of that; they only call `tell`.
"""

from collections.abc import Callable


class Uses:
    """The current listeners. Without any, a call to `tell` costs next to nothing."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[object], None], ...] = ()  # replaced, never changed: threads call `tell`, too

    def tell(self, thing: object) -> None:
        """`thing` is being used. A listener may raise; the error appears at the line that uses it."""
        for listener in self._listeners:
            listener(thing)

    def add(self, listener: Callable[[object], None]) -> None:
        """Add a listener."""
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: Callable[[object], None]) -> None:
        """Remove a listener. Idempotent."""
        self._listeners = tuple(one for one in self._listeners if one != listener)


uses = Uses()
