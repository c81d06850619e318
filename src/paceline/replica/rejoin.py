"""A replica outlives its process group: when ranks were interrupted, it goes on in the group after it.

All ranks must hold it still. A rank whose process was replaced does not: there the model is made anew, on all ranks.

What an interrupt leaves behind
-------------------------------
Ranks that are stopped at any time stand in different places: one in the reduction of a step, the next one still in its
forward, in the middle of the optimizer's update, or already past it. Gradients that were under way are dropped on all
of them. Where they differ, all take everything from one rank that is between two updates, of those that have made the
most, and a line says so: see `Overseer.make_equal`.
"""

import gc
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.reducer.leaving import begin_anew, give_up
from paceline.replica.agreement import Overseer
from paceline.strategies.lane_sum import LaneSum

if TYPE_CHECKING:
    from paceline.replica.ddp import DistributedDataParallel


def outlive_group() -> int:
    """To be called by all ranks when the default group was destroyed and formed anew: replicas that were in the old one
    rejoin, each in its next forward. Returns how many there are."""
    from paceline.replica.ddp import DistributedDataParallel

    # Asked of the collector, so that nobody keeps a list of replicas. Not by isinstance(), which asks the objects.
    found = [one for one in gc.get_objects() if DistributedDataParallel in type(one).__mro__]
    mine = [one for one in found if isinstance(getattr(one, "_transport_choice", None), str) and _is_left(one)]
    for replica in mine:
        replica._group_is_gone = True
    return len(mine)


def _is_left(replica: "DistributedDataParallel") -> bool:
    """Whether it belongs to a group that exists no more, and not to one that its user made beside the default one."""
    return replica.process_group not in dist.distributed_c10d._world.pg_map


def rejoin(replica: Any) -> None:
    """Go on over the default group. Every rank that holds the replica must call it, as it does the constructor."""
    give_up(replica._core)
    if replica._lane_count is not None:
        replica._lane_loop.begin_anew()
    replica._move_to_group(None)
    replica._check_same_model("broadcast")
    move(replica)
    overseer = replica._core.oversight
    if isinstance(overseer, Overseer):
        overseer.make_equal(replica._core.ledger)
        if replica._lane_count is not None:
            replica._lane_loop.buffers.put_back()
    else:
        replica._start_equal("broadcast", with_buffers=True)
    replica._group_is_gone = False  # not before: who fails on the way, or is stopped again, tries again


def join_later(replica: Any) -> None:
    """A copy is trained for the first time: it gets a group of its own. Every rank that holds it must call it."""
    replica._move_to_group(None)
    replica._check_same_model("broadcast")
    move(replica)
    replica._joins_later = False


def move(replica: Any) -> None:
    """The replica's group has moved to other ranks: nothing that was known of the ones before is known of them."""
    core = replica._core
    if core.lanes is not None:
        core.reduction = replica._reduction = LaneSum(core.lanes.count, replica._transport, replica.device)
    begin_anew(core)
    replica._gate.begin_anew()
    if isinstance(core.oversight, Overseer):
        core.oversight.begin_anew()
