"""The path of several ranks, on one: what the machinery costs when the network costs nothing."""

from inspect import signature
from typing import Any

import torch.distributed as dist

from paceline.errors import UsageError


def several_of_one() -> Any:
    """A transport over the default group, of one rank, whose replica does all that it does among several ranks."""
    import paceline
    from paceline.collectives import TorchDistTransport

    world = dist.group.WORLD
    assert world is not None, "the task has formed it"
    make: Any = TorchDistTransport
    if "counts_as_several" in signature(make).parameters:
        return make(world, counts_as_several=True)
    # A checkout whose transport has no such keyword. It is a subclass, not a wrapper, so that no call costs more.
    if not (hasattr(make, "alone") and hasattr(make, "apart")):
        raise UsageError(
            f"{make.__module__}: expected TorchDistTransport to take counts_as_several=True, or to have the properties "
            "that older checkouts have (alone, apart); otherwise one rank cannot count as several"
        )
    several = type("Several", (make,), {"alone": False, "apart": lambda self, *_, **__: self})
    ddp: Any = paceline.DistributedDataParallel
    if not hasattr(ddp, "_transport_choice"):
        # Some checkouts ask for the name of the chosen transport even when they were given an object.
        ddp._transport_choice = "torch"
    return several(world)
