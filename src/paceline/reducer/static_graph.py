"""Which parameters the first reduction used, and whether later ones use the same, as with a static graph."""

from collections.abc import Sequence

from paceline.errors import GraphChanged
from paceline.reducer.bucket import GradSlot


class GraphMemory:
    """Remembers which parameters the first reduction used."""

    def __init__(self) -> None:
        self._first: list[bool] | None = None
        self.used_everything = False  # the first reduction did; a later one that does so too needs no comparison
        self.changed = False

    def compare(self, slots: Sequence[GradSlot], *, static: bool) -> GraphChanged | None:
        """The error to raise if the graph was declared static and has changed."""
        now = [slot.used for slot in slots]
        if self._first is None:
            self._first, self.used_everything = now, all(now)
        if self._first == now:
            return None
        self.changed = True
        if not static:
            return None
        changed = [
            f"{slot.meta.name} ({'used' if is_used else 'unused'} now, {'used' if was_used else 'unused'} before)"
            for slot, was_used, is_used in zip(slots, self._first, now, strict=True)
            if was_used != is_used
        ]
        return GraphChanged(
            "Your training graph has changed in this iteration, which is not compatible with static_graph=True: "
            + ", ".join(changed)
            + ". Leave static_graph off: unused parameters need no flag here."
        )
