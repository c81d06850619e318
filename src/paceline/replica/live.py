"""The replicas of this process, oldest first. They are found through their step guards."""

from typing import Any

from torch import nn

from paceline.reducer.reducer import Reducer
from paceline.replica.guard import guards


def all_replicas() -> list[Any]:
    """The replicas themselves."""
    found = [guard.replica() for guard in guards.live()]
    return [replica for replica in found if replica is not None]


def live_replicas() -> list[tuple[nn.Module, Reducer]]:
    """The modules that are wrapped, each with its reducer."""
    found = [(guard.module, guard.reducer()) for guard in guards.live()]
    return [(module, reducer) for module, reducer in found if module is not None and reducer is not None]
