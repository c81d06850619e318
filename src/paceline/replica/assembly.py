"""Builds and connects the parts of a replica: reducer, lanes, monitor, capsules, gate and guard."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from paceline.collectives.group import Group
from paceline.collectives.reduction import Mean
from paceline.collectives.reduction_protocol import Reduction
from paceline.collectives.stream_work import StreamRecorder
from paceline.collectives.subgroup import Subgroup, ranks_of
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.device_clock import DeviceClock
from paceline.layout import Layout, ParamMeta, lay_groups, plan_layout
from paceline.placement import find_units, group_by_unit
from paceline.progress import own_progress
from paceline.reducer.allocate import Sharding
from paceline.reducer.buckets import BucketSet
from paceline.reducer.callbacks import BackwardCallbacks
from paceline.reducer.lane_batch import LaneBatch
from paceline.reducer.lanes import Lanes
from paceline.reducer.reducer import Reducer
from paceline.reducer.repeated_lane import AuditedLanes
from paceline.replica.agreement import Agreement
from paceline.replica.capsules import CapsuleWriter
from paceline.replica.compared_state import ComparedState
from paceline.replica.gate import UpdateGate
from paceline.replica.guard import StepGuard
from paceline.replica.lane_audit import check_audits
from paceline.replica.lane_buffers import LaneBuffers
from paceline.replica.lane_loop import LaneLoop
from paceline.replica.mixed_precision import NarrowParameters, cast_buffers, reduction_for
from paceline.replica.monitor import ReplicaMonitor
from paceline.replica.owned import OwnedBlocks
from paceline.replica.recording import recording_asked
from paceline.replica.strangers import Strangers
from paceline.replica.twin_state import TwinState
from paceline.replica.units import Units, make_units
from paceline.replica.update_gathers import UpdateGathers
from paceline.strategies.cast import mean_in
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.lane_sum import LaneSum, OnDamage
from paceline.strategies.scatter_mean import HybridMean, ScatterMean
from paceline.trace import Trace

if TYPE_CHECKING:
    from paceline.replica.ddp import DistributedDataParallel


BUCKETS_IN_TURN = 2  # buckets with memory at a time if gradients are sharded: one fills while one is reduced


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a replica."""

    core: Reducer
    gate: UpdateGate
    guard: StepGuard
    lane_loop: LaneLoop | None
    capsules: CapsuleWriter | None
    narrow: NarrowParameters | None
    owned: OwnedBlocks | None
    state_hooks: Sequence[RemovableHandle]

    def prepares(self) -> Callable[[], None] | None:
        """The function that prepares parameters before every forward."""
        if self.narrow is not None:
            return self.narrow.narrow
        return None if self.owned is None or self.owned.gathers is None else self.owned.gathers.before_forward

    def closer(self) -> Callable[[], None]:
        """The function that restores the parameters and the module. It does not keep the units alive: they hold the
        module, which may hold the replica, as a trainer's module does."""
        units = None if self.owned is None or self.owned.units is None else weakref.ref(self.owned.units)
        gathers = None if self.owned is None else self.owned.gathers
        return partial(_close, self.guard, self.core, self.state_hooks, units, gathers)


def _close(
    guard: StepGuard,
    core: Reducer,
    state_hooks: Sequence[RemovableHandle],
    units: "weakref.ref[Units] | None",
    gathers: UpdateGathers | None,
) -> None:
    guard.close()
    if gathers is not None:
        gathers.close()
    if units is not None and (alive := units()) is not None:
        alive.close()
    core.hooks.close()
    for hook in state_hooks:
        hook.remove()


def assemble(replica: "DistributedDataParallel") -> Assembly:
    """Lay out the gradients, hook the parameters, and connect the parts."""
    check_audits(replica._agreement, replica._lane_count, replica._placement, replica._group)
    _show_progress()
    metas, trace = metas_of(replica), _trace(replica)
    owned = _owned(replica, metas, trace)
    config, narrow = replica.mixed_precision, None
    if config is not None:
        narrow = NarrowParameters(replica._module_parameters, config.param_dtype)
    capsules: CapsuleWriter | None = None  # made below: it reads from the reducer

    def note_failure() -> None:
        if capsules is not None:
            capsules.on_failed_backward()

    core = _reducer(replica, owned, metas, _callbacks(owned, narrow, note_failure), trace)
    buffers = _lane_buffers(replica, core)
    capsules = _capsules(replica, core, buffers)
    lane_loop = _lane_loop(replica, core, buffers, capsules)
    gate = _gate(replica, core)
    monitor = _monitor(replica, core, gate, buffers, capsules, owned, narrow)
    ids = frozenset(id(param) for param in replica._managed.params)
    frozen = [param for param in replica._module_parameters if id(param) not in ids]
    strangers = Strangers(ids, frozenset(replica.parameters_to_ignore), frozen)
    guard = StepGuard(core, replica, strangers, refuses=replica._guard_refuses, gate=gate)
    state_hooks: list[RemovableHandle] = []
    if narrow is not None:
        state_hooks = narrow.widen_before_state_is_read(replica.module)
        cast_buffers(replica.module, config.buffer_dtype, replica.parameters_to_ignore)
    if monitor is not None and replica._placement.shards_parameters and replica._shard_groups is None:
        monitor.stop_comparing()  # no two ranks hold anything that should be equal
    return Assembly(core, gate, guard, lane_loop, capsules, narrow, owned, state_hooks)


def _trace(replica: "DistributedDataParallel") -> Trace:
    """One for the life of a replica: when it is made of other parts for other ranks, its stamps say so."""
    before: Reducer | None = getattr(replica, "_core", None)
    clock = DeviceClock(StreamRecorder(replica.device)) if replica.device.type == "cuda" else None
    trace = Trace(clock=clock) if before is None else before.trace
    trace.generation = replica._group.generation
    return trace


def _callbacks(
    owned: OwnedBlocks | None, narrow: NarrowParameters | None, note_failure: Callable[[], None]
) -> BackwardCallbacks:
    finished: list[Callable[[], None]] = [] if narrow is None else [narrow.widen]
    failed = [note_failure]
    if owned is not None and owned.units is not None:
        finished.append(_weakly(owned.units.end_backward))
        failed.append(_weakly(owned.units.fail))
    return BackwardCallbacks(tuple(finished), tuple(failed))


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Call a method of an object without keeping it alive: parameter hooks hold the reducer where Python's
    collector cannot see it, and units hold the module."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    return call


def _show_progress() -> None:
    """Report the progress of this rank to the launcher, if there is one, from now on."""
    own_progress().begin()
    if dist.is_initialized():
        own_progress().note_end(lambda: not dist.is_initialized())


def reduction_of(replica: "DistributedDataParallel") -> Reduction:
    """How the buckets of a replica are combined over the ranks that it has now."""
    if replica._lane_count is not None:
        return LaneSum(replica._lane_count, replica._group.transport, replica.device, _on_damage(replica))
    if replica.mixed_precision is not None:
        return reduction_for(replica.mixed_precision, replica._managed.params)
    dtype = replica._reduce_dtype
    if replica._placement.shards_optimizer and isinstance(replica._reduction, Mean):
        groups = replica._shard_groups
        if groups is None or replica._transport.traits(replica.device).sharded:
            return ScatterMean(dtype)
        return HybridMean(groups, replica.device, dtype)
    if dtype is not None:
        return mean_in(dtype, {param.dtype for param in replica._managed.params})
    return replica._reduction


def _on_damage(replica: "DistributedDataParallel") -> OnDamage | None:
    """The callback for a damaged slice of a bucket, if checksums are on."""
    if replica._agreement is None or not replica._agreement.checksums:
        return None
    known = weakref.ref(replica)  # the reduction must not keep it alive: see _weakly

    def note(bucket: int, sender: int) -> None:
        if (alive := known()) is not None:
            assert isinstance(alive._core.batch, LaneBatch)
            alive._core.batch.note_damage(bucket, sender)

    return note


def _owned(replica: "DistributedDataParallel", metas: Sequence[ParamMeta], trace: Trace) -> OwnedBlocks | None:
    """This rank's blocks of the parameters, if the placement shards them and there is another rank. In an
    elastic job others may join later, so they are cut over one rank too; optimizers hold them, so they are kept."""
    if not replica._placement.shards_optimizer or (replica._group.single and not replica._in_generations):
        return None
    if replica._in_generations and (known := replica._owned) is not None:
        if known.units is not None:
            known.units.hook()
        return known
    group = sharing(replica)
    owned = OwnedBlocks(replica._managed.params, metas, group, cut=True, trace=trace)
    if replica._placement.shards_parameters:
        owned.units = _units(replica, owned, group, trace)
    else:
        owned.gathers = UpdateGathers(replica.module, group, replica.device)
    if replica._in_generations:
        owned.outlive()
    return owned


def sharing(replica: "DistributedDataParallel") -> Group:
    """The group of ranks, with this one, that hold all shards between them."""
    return replica._group if replica._shard_groups is None else replica._shard_groups.shard


def _units(replica: "DistributedDataParallel", owned: OwnedBlocks, others: Group, trace: Trace) -> Units:
    """Shard the parameters. They are gathered over a duplicate of the group, because a rank that does not use a
    parameter reduces its bucket later than others, and so at another point in the sequence of gathers."""
    for shard in owned.shards:
        shard.leave_parameter()
    transport = others.transport.dup(others.timeout_s)
    connected = transport.connect() if isinstance(transport, TorchDistTransport) else transport
    group = Subgroup(connected, others.timeout_s, ranks_of(others))
    weakref.finalize(replica, group.close)
    modules = find_units(replica.module, replica._units)
    indices = group_by_unit(modules, replica._managed.params, replica.module)
    return make_units(replica.module, modules, indices, owned.shards, owned.ownership.cuts, group, trace)


def _reducer(
    replica: "DistributedDataParallel",
    owned: OwnedBlocks | None,
    metas: Sequence[ParamMeta],
    callbacks: BackwardCallbacks,
    trace: Trace,
) -> Reducer:
    group, count = replica._group, replica._lane_count
    kind = AuditedLanes if _audits(replica) else Lanes
    lanes = None if count is None else kind(count, group.rank, group.size)
    shards = () if owned is None else owned.shards
    ownership = None if owned is None else owned.ownership
    # In lanes the sums of earlier lanes need memory for all gradients anyway.
    turns = BUCKETS_IN_TURN if shards and replica._placement.shards_gradients and lanes is None else None
    units = None if owned is None else owned.units
    layout = _layout(replica, metas) if units is None else _unit_layout(metas, units)
    buckets = BucketSet(replica._managed.params, layout, Sharding(ownership, shards, turns))
    return Reducer(buckets, group, reduction_of(replica), replica._settings, callbacks, lanes, trace)


def metas_of(replica: "DistributedDataParallel") -> list[ParamMeta]:
    managed = replica._managed
    if replica._owned is not None and replica._owned.units is not None:  # sharded parameters have no strides
        return list(replica._owned.metas)
    return [
        ParamMeta(name, tuple(p.shape), tuple(p.stride()), p.dtype, p.device, sparse)
        for name, p, sparse in zip(managed.names, managed.params, managed.sparse, strict=True)
    ]


def _layout(replica: "DistributedDataParallel", metas: Sequence[ParamMeta]) -> Layout:
    """Backward visits parameters in about the reverse order of registration; delayed ones come last."""
    managed = replica._managed
    delayed = {id(param) for param in replica._delay_all_reduce_params}
    backwards = range(len(metas) - 1, -1, -1)
    order = sorted(backwards, key=lambda index: id(managed.params[index]) in delayed)
    return plan_layout(metas, order, replica._settings.caps)


def _unit_layout(metas: Sequence[ParamMeta], units: Units) -> Layout:
    """A bucket for each unit, or one for each type of its gradients, in the order of backward; the root comes last."""
    groups: list[list[int]] = []
    for indices in (*reversed(units.indices[:-1]), units.indices[-1]):
        by_kind: dict[Any, list[int]] = {}
        for index in reversed(indices):
            by_kind.setdefault(metas[index].kind, []).append(index)
        groups += by_kind.values()
    return lay_groups(metas, groups)


def _lane_buffers(replica: "DistributedDataParallel", core: Reducer) -> LaneBuffers | None:
    lanes = core.batch.lanes
    return None if lanes is None else LaneBuffers(replica.module, replica.parameters_to_ignore, lanes)


def _audits(replica: "DistributedDataParallel") -> Agreement | None:
    """The agreement, if it asks for audits."""
    return replica._agreement if replica._agreement is not None and replica._agreement.audit_every else None


def _capsules(replica: "DistributedDataParallel", core: Reducer, buffers: LaneBuffers | None) -> CapsuleWriter | None:
    agreement = replica._agreement
    if agreement is None or agreement.capsules is None:
        return None
    return CapsuleWriter(agreement, core, replica.module, replica._seed, replica.device, buffers)


def _lane_loop(
    replica: "DistributedDataParallel", core: Reducer, buffers: LaneBuffers | None, capsules: CapsuleWriter | None
) -> LaneLoop | None:
    recording = recording_asked(replica.module, core.batch.lanes) if replica._group.size == 1 else None
    if buffers is None:
        return None
    return LaneLoop(core, buffers, capsules, recording, _audits(replica), replica._seed, replica.device)


def _monitor(
    replica: "DistributedDataParallel",
    core: Reducer,
    gate: UpdateGate,
    buffers: LaneBuffers | None,
    capsules: CapsuleWriter | None,
    owned: OwnedBlocks | None,
    narrow: NarrowParameters | None,
) -> ReplicaMonitor | None:
    """The monitor of the replica, if it is enabled and there is something to monitor."""
    agreement, group = replica._agreement, replica._group
    if agreement is None or (group.single and agreement.not_finite == "keep"):
        return None
    params = [(n, p) for n, p in replica.module.named_parameters() if n not in replica.parameters_to_ignore]
    twins, groups = None, replica._shard_groups
    if owned is not None and groups is not None:
        instead = replica._placement.shards_parameters
        every = agreement.state_every if instead else agreement.state_every // 2
        twins = TwinState(groups, owned.shards, max(1, every), instead=instead)
    wide = None if narrow is None else narrow.wide
    state = ComparedState(params, agreement.state_every, buffers, twins, wide)
    monitor = ReplicaMonitor(
        agreement,
        group,
        state,
        adds=replica._lane_count or 1,
        only_adds=lambda: isinstance(core.schedule.reduction, Mean | ScatterMean | HybridMean | FixedOrder | LaneSum),
        bad_in=gate.bad_in,
        on_finding=None if capsules is None else capsules.on_finding,
    )
    if group.single:
        gate.on_checked = monitor.non_finite.decide_alone
    core.schedule.observer = monitor
    return monitor


def _gate(replica: "DistributedDataParallel", core: Reducer) -> UpdateGate:
    """The gate that keeps optimizers on a device from using invalid gradients."""
    managed, agreement = replica._managed, replica._agreement
    names = {id(param): name for name, param in zip(managed.names, managed.params, strict=True)}
    return UpdateGate(core, names, looks=agreement is not None and agreement.not_finite != "keep")
