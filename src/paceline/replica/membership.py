"""Which ranks a replica works with: joining a group, moving to another, and surviving the end of one.

All ranks must still hold the replica. A rank whose process was replaced does not: then the model must be built again on
all ranks. In an elastic job `paceline.Elastic` takes care of that: it moves replicas to each generation, and gives new
ranks the state.

What an interrupt leaves behind
-------------------------------
Ranks that are stopped at arbitrary times are at different points: one in the reduction of a step, another still in its
forward, in the middle of the optimizer's update, or already past it. Gradients in flight are dropped on all of them. If
their states differ, all take everything from one rank between two updates, among those with the most updates, and a
message is logged: see `start_equal.resume_from_one_rank`.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.choose import choose
from paceline.collectives.group import Group
from paceline.collectives.local import LocalTransport
from paceline.collectives.protocols import Transport
from paceline.collectives.reduction_protocol import forget_other_ranks
from paceline.collectives.subgroup import ShardGroups
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import UsageError
from paceline.member import Member, in_elastic_job
from paceline.placement import shard_size
from paceline.reducer.other_ranks import follow_group
from paceline.reducer.participation import discard_in_flight
from paceline.replica import arguments, start_equal
from paceline.replica.assembly import reduction_of, sharing
from paceline.replica.live import all_replicas
from paceline.replica.monitor import ReplicaMonitor
from paceline.strategies.comm_hook import CommHook


def outlive_group() -> int:
    """All ranks call it after the default group was destroyed and formed again: replicas of the old one rejoin, each in
    its next forward. Returns their number."""
    alive = dist.distributed_c10d._world.pg_map
    # A replica over some of the ranks stays without a group: the new default group has other ranks.
    mine = [one for one in all_replicas() if one._in_default_group and one.process_group not in alive]
    for replica in mine:
        replica._group_is_gone = True
    return len(mine)


def join(
    replica: Any, transport: str | Transport, process_group: Any, device_mesh: Any, timeout_s: float | None
) -> Group:
    """A group of the replica's own, over the ranks of `process_group`. All of them call it."""
    default = process_group is None and device_mesh is None
    if isinstance(transport, str) and default and in_elastic_job() and not dist.is_initialized():
        # Its first generation is formed later, and elsewhere: see `enter_generation`.
        replica.process_group, replica._in_default_group, replica._group_is_gone = None, True, True
        replica._in_generations = True
        found: Transport = LocalTransport()
    elif isinstance(transport, str):
        found = _own_transport(replica, users_transport(replica, process_group, device_mesh), timeout_s)
    else:
        of_transport = transport.users_group if isinstance(transport, TorchDistTransport) else None
        replica.process_group = of_transport if process_group is None else process_group
        found = _own_transport(replica, transport, timeout_s)
    group = Group(found, timeout_s, owned=found is not transport)
    group.generation = _number_in_job() or 0
    weakref.finalize(replica, group.close)
    return group


def _number_in_job() -> int | None:
    """The number of the generation in an elastic job: ranks that are new cannot count how often others have moved."""
    member = Member.own()
    return None if member is None or member.generation is None else member.generation.number


def users_transport(replica: Any, process_group: Any = None, device_mesh: Any = None) -> Transport:
    """The user's group as a transport."""
    replica.process_group = arguments.choose_group(process_group, device_mesh)
    replica._in_default_group = replica.process_group is dist.group.WORLD
    if device_mesh is not None:
        replica.device_mesh = device_mesh
        if arguments.is_sliced(device_mesh):
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(replica.module)
    # A group defined in Python may have effects even for one rank, so it is always called.
    stock = type(replica.process_group) is dist.ProcessGroup
    alone = replica._transport_choice == "local" or (stock and replica.process_group.size() == 1)
    return LocalTransport() if alone else TorchDistTransport(replica.process_group)


def _own_transport(replica: Any, shared: Transport, timeout_s: float | None) -> Transport:
    """A transport over the same ranks for the collectives of this replica only."""
    if not isinstance(shared, TorchDistTransport):
        return shared.dup(timeout_s)
    devices = _devices_of(replica)
    if replica._transport_choice is None:
        return shared.dup(timeout_s, devices).connect()
    return choose(shared, replica._transport_choice, devices, timeout_s)


def _devices_of(replica: Any) -> set[torch.device]:
    """The devices of the parameters, now or later."""
    return {replica._start_device if param.is_meta else param.device for param in replica.module.parameters()}


def form_shard_groups(replica: Any) -> ShardGroups | None:
    """The groups of a replica whose shards are over some of its ranks. None if they are over all ranks, or if it has
    none. All ranks call it."""
    if replica._group_is_gone:
        return None  # it is alone until the first generation
    size = shard_size(replica._shard, replica._group.size, replica._copies)
    if not replica._placement.shards_optimizer or size == replica._group.size:
        return None
    wanted = replica._transport_choice or "torch"
    if replica._transport_choice is None and not isinstance(replica._transport, TorchDistTransport):
        raise UsageError(
            f"shard= needs groups of some of the ranks, which only the code that made a "
            f'{type(replica._transport).__name__} could form; pass the name of a transport, such as "auto"'
        )
    devices = _devices_of(replica)
    base = TorchDistTransport(replica.process_group)
    groups = ShardGroups.of(base, size, wanted, devices, replica._group.timeout_s)
    replica._close_shard_groups = weakref.finalize(replica, groups.close)
    return groups


def move(replica: Any, process_group: Any = None, *, compares: bool) -> None:
    """Continue with the ranks of another process group; None: the default one. All of them call it. Nothing that was
    known about the previous ranks applies to them. `compares`: check whether their models are equal."""
    group, core = replica._group, replica._core
    group.move(_own_transport(replica, users_transport(replica, process_group), group.timeout_s), _number_in_job())
    if compares:
        start_equal.check_same_model(replica, "broadcast")
    if replica._built_alone != group.single:  # the parts of a replica depend on whether there are other ranks
        _build_anew(replica)
        return
    follow_group(core, reduction_of(replica) if core.batch.has_lanes else core.schedule.reduction)
    replica._gate.begin_anew()
    if isinstance(core.schedule.observer, ReplicaMonitor):
        core.schedule.observer.begin_anew()


def _build_anew(replica: Any) -> None:
    """Rebuild the parts of a replica for its current group. The user's settings are kept."""
    before, owned = replica._core, replica._owned
    forget_other_ranks(before.schedule.reduction)
    replica._closing()
    replica._build()
    replica._owned = replica._owned or owned  # masters of whole parameters, which optimizers keep
    replica._core.sync_on = before.sync_on
    if isinstance(before.schedule.reduction, CommHook):
        replica._core.schedule.reduction = before.schedule.reduction
        if replica._core.schedule.observer is not None:
            replica._core.schedule.observer.stop_comparing()


def discard(replica: Any) -> None:
    """Drop everything in progress: a backward, its gradients, and a loop over lanes, whose buffers are restored."""
    discard_in_flight(replica._core)
    if replica._lane_loop is not None:
        replica._lane_loop.begin_anew()
    if replica._owned is not None:
        replica._owned.discard()


def enter_generation(replica: Any) -> None:
    """Continue with the default group, which this rank has just joined. All members call it. Their models are
    then alike; equal values are up to the caller. A sharded replica can be used again after it has taken up its cut,
    which may be a new one in this generation: see `take_up_cut`."""
    discard(replica)
    if replica._placement.shards_optimizer:
        _move_in_shards(replica)
    else:
        move(replica, compares=True)
    replica._group_is_gone = False


def _move_in_shards(replica: Any) -> None:
    """Form the groups of this generation. This rank still owns the same blocks."""
    group = replica._group
    group.move(_own_transport(replica, users_transport(replica), group.timeout_s), _number_in_job())
    start_equal.check_same_model(replica, "broadcast")
    replica._check_placement()
    if replica._close_shard_groups is not None:
        replica._close_shard_groups()
    replica._group_is_gone, replica._shard_groups = False, None
    replica._shard_groups = form_shard_groups(replica)
    replica._owned.move(sharing(replica))


def take_up_cut(replica: Any) -> None:
    """Own the blocks of this generation's rank, and rebuild the parts of the replica for them. Values of blocks not
    owned before must come from other ranks: see `OwnedBlocks.cut_anew`. No communication."""
    if replica._in_generations:  # outside elastic jobs it never changes
        replica._owned.cut_anew()
        _build_anew(replica)


def rejoin(replica: Any) -> None:
    """Continue with the default group. Every rank that holds the replica must call it, as it does the constructor."""
    replica._refuse_in_shards("continuing in a new process group")
    discard(replica)
    move(replica, compares=True)
    monitor, loop = replica._core.schedule.observer, replica._lane_loop
    if isinstance(monitor, ReplicaMonitor):
        start_equal.resume_from_one_rank(monitor, replica._core.step_state)
        if loop is not None:
            loop.buffers.put_back()
    else:
        start_equal.make_equal(replica, "broadcast", with_buffers=True)
    replica._group_is_gone = False  # only now: if rejoining fails or is interrupted, it is tried again


def join_later(replica: Any) -> None:
    """A copy is trained for the first time: it gets a group of its own. Every rank that holds it must call it."""
    move(replica, compares=True)
    replica._joins_later = False
