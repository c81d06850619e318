"""Whether the graph is the same in every step, as far as the set of used parameters tells."""

from collections.abc import Sequence

from paceline.errors import GraphChanged
from paceline.reducer.slot import GradSlot


class GraphMemory:
    """Remembers which parameters the first reduction used."""

    def __init__(self) -> None:
        self._first: list[bool] | None = None
        self.changed = False

    def compare(self, slots: Sequence[GradSlot], *, everything: bool, static: bool) -> GraphChanged | None:
        """The error to raise when the graph was declared static and is not. `everything`: all parameters were used."""
        now = [True] * len(slots) if everything else [slot.used for slot in slots]
        if self._first is None:
            self._first = now
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
