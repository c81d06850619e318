"""A replica outlives its process group: when ranks were interrupted, it goes on in the group after it.

All ranks must hold it still. A rank whose process was replaced does not: there the model is made anew, on all ranks.

What an interrupt leaves behind
-------------------------------
Ranks that are stopped at any time stand in different places: one in the reduction of a step, the next one still in its
forward, or already past the optimizer's update. Gradients that were under way are dropped on all of them. Where one has
stepped and another has not, they differ by a step; the majority's parameters and optimizer state are then taken by all,
or rank 0's where there is no majority, and a line says so.
"""

import gc
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.reducer.leaving import give_up, move_to
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
    replica._transport.close()
    replica._join_world(replica._transport_choice, None, None)
    replica._check_same_model("broadcast")
    base = replica._transport
    overseer = replica._core.oversight
    if isinstance(overseer, Overseer):
        overseer.begin_anew(base)
        overseer.make_equal(root=0)
        if replica._lane_count is not None:
            replica._lane_loop.buffers.put_back()
    else:
        replica._start_equal("broadcast", with_buffers=True)
    move(replica)
    if isinstance(overseer, Overseer):
        overseer.begin_anew(replica._transport)
    replica._group_is_gone = False  # not before: who fails on the way, or is stopped again, tries again


def move(replica: Any) -> None:
    """Take a transport of its own over the group that the replica is in now, and go on there."""
    replica._take_own_transport()
    core = replica._core
    if core.lanes is not None:
        core.reduction = replica._reduction = LaneSum(core.lanes.count, replica._transport, replica.device)
    move_to(core, replica._transport)
