"""The places of a job's slots in a cluster: placement groups, and what they wait for."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True)
class Needs:
    """The resources that one rank needs."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}{gpus}"


@dataclass(frozen=True)
class Place:
    """Where an agent is. `port` is a free one of its machine; `clock_ns` is what to add to its monotonic clock."""

    node: str
    address: str
    interface: str
    port: int
    gpus: tuple[str, ...]
    clock_ns: int


class Places:
    """One placement group for the first `together` slots, which Ray grants as a whole or not at all, and one for each
    other slot.
    """

    def __init__(self, together: int, needs: Needs) -> None:
        self.together = together
        self.needs = needs
        self._groups: dict[int, Any] = {}  # by their first slot

    def options(self, slot: int) -> dict[str, Any]:
        """How to ask Ray for an actor in a slot."""
        first = 0 if slot < self.together else slot
        if first not in self._groups:
            bundle = {"CPU": self.needs.cpus, **({"GPU": self.needs.gpus} if self.needs.gpus else {})}
            count = self.together if slot < self.together else 1
            self._groups[first] = placement_group([bundle] * count, strategy="PACK")
        return {
            "num_cpus": self.needs.cpus,
            "num_gpus": self.needs.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[first], placement_group_bundle_index=slot - first
            ),
        }

    def release(self, slot: int) -> None:
        """The machine of a slot does not answer. A slot with a group of its own gets another at once. The others keep
        theirs, which Ray moves when it has noticed too: with both, one would reserve a machine that is not used.
        """
        if slot >= self.together and (group := self._groups.pop(slot, None)) is not None:
            remove_placement_group(group)

    def close(self) -> None:
        """Release all placement groups."""
        while self._groups:
            remove_placement_group(self._groups.popitem()[1])


def describe_wait(slots: Collection[int], needs: Needs, named: str) -> str:
    """The message about slots that wait for room."""
    free = ray.available_resources()
    there = Needs(free.get("CPU", 0.0), free.get("GPU", 0.0) if needs.gpus else 0.0)
    nodes = len([node for node in ray.nodes() if node["Alive"]])
    each = "it needs" if len(slots) == 1 else "each of them needs"
    return (
        f"{named} wait{'s' * (len(slots) == 1)} for room in the Ray cluster: {each} {needs}; its {nodes} "
        f"machine{'s have' if nodes != 1 else ' has'} {there} free"
    )
