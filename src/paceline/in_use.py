"""Who is told that something is used whose position or state belongs to a run.

`paceline.elastic` asks while an attempt runs: all that an attempt uses has to be declared to it, or a rank that is new
would stand at another place. What is used knows nothing of that, and tells.
"""

from collections.abc import Callable


class Uses:
    """Those who listen now. As long as nobody does, telling costs next to nothing."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[object], None], ...] = ()  # replaced, never changed: threads tell, too

    def tell(self, thing: object) -> None:
        """`thing` is being used. A listener may raise, in the line that uses it."""
        for listener in self._listeners:
            listener(thing)

    def add(self, listener: Callable[[object], None]) -> None:
        """From here on `listener` is told."""
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: Callable[[object], None]) -> None:
        """`listener` is told no more. Idempotent."""
        self._listeners = tuple(one for one in self._listeners if one != listener)


uses = Uses()
