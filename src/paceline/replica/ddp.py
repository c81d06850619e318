"""The drop-in: torch's DistributedDataParallel, with paceline's reducer inside."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from paceline.bucket_plan import Plan
from paceline.collectives.api import Transport
from paceline.collectives.choose import choose
from paceline.collectives.group import Group
from paceline.collectives.local import LocalTransport
from paceline.collectives.reduction import Reduction
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import UsageError
from paceline.kernels import kernel_settings
from paceline.layout import BucketCaps, Layout, ParamMeta, plan_layout
from paceline.progress import Phase, own_progress
from paceline.reducer.autograd import refuse_compiled_autograd
from paceline.reducer.lanes import Lanes
from paceline.reducer.reducer import Reducer
from paceline.reducer.settings import ReducerSettings
from paceline.replica import arguments, rejoin, start_equal
from paceline.replica.agreement import Agreement, Overseer
from paceline.replica.capsules import CapsuleWriter
from paceline.replica.gate import UpdateGate
from paceline.replica.guard import StepGuard
from paceline.replica.lanes import LaneLoop
from paceline.replica.mixed_precision import NarrowParameters, cast_buffers, reduction_for
from paceline.replica.outputs import tensors_in
from paceline.replica.recording import recording_asked
from paceline.replica.stepping import Stepping
from paceline.replica.torch_surface import TorchReducer
from paceline.replica.untraced import keep_out_of_graphs
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.lane_sum import LaneSum
from paceline.strategies.reduction import Mean
from paceline.trace import Moment, Trace


class DistributedDataParallel(Stepping):
    """Keep one replica of `module` per rank equal, by averaging gradients while backward runs.

    Takes every argument of `torch.nn.parallel.DistributedDataParallel` with torch's meaning, and:

    Args:
        init: "broadcast" starts every replica from rank 0's values; "verify" overwrites nothing and raises
            `ReplicasDiffer` on every rank when values differ.
        overlap: reduce buckets while backward runs. With False, call `sync_gradients()` after backward.
        transport: "auto" takes shared memory for CPU tensors of ranks that share a host ("shm"), shared memory inside
            hosts and torch.distributed between them ("two-level"), and torch.distributed otherwise ("torch").
            Or a `Transport`. The environment variable PACELINE_TRANSPORT says what "auto" is, where it is set.
        reduction: how a bucket is combined; the mean by default.
        bucket_plan: "auto" measures the first steps and cuts the buckets so that the last one is reduced soonest;
            "fixed" keeps torch's sizes, as `bucket_cap_mb` and `bucket_cap_mb_list` do when given.
        unused: "zero" lets parameters that take no part in a backward be; "error" raises on every rank.
        guard: refuse optimizer steps on gradients that were never reduced.
        timeout: seconds after which a wait for another rank is an error. None: the process group's own timeout.
        lanes: give the same bits in a world of any size up to this number: see `lanes()`. None: PACELINE_LANES of the
            environment, or no lanes.
        seed: of the random numbers that lanes draw.
        agreement: what ranks check of each other in every step; see `Agreement`. None: its defaults, or nothing with
            `guard=False`.

    Example:
        >>> model = paceline.DistributedDataParallel(net)
        >>> loss = model(x).sum(); loss.backward()   # gradients are now the mean over all ranks
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        lazy_bucket_allocation: bool = False,  # torch 2.15's; a gradient is its bucket, so there is none to let go of
        init: str = "broadcast",
        overlap: bool = True,
        transport: str | Transport = "auto",
        reduction: Reduction | None = None,
        bucket_plan: str = "auto",
        unused: str = "zero",
        guard: bool = True,
        timeout: float | None = None,
        lanes: int | None = None,
        seed: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        transport, lanes = arguments.or_from_environment(transport, lanes)
        arguments.check_module(module)
        arguments.check_choices(init=init, unused=unused, bucket_plan=bucket_plan)
        arguments.check_objects(timeout=timeout, transport=transport, reduction=reduction)
        if mixed_precision is not None and reduction is not None:
            raise UsageError("mixed_precision says in which dtype gradients are reduced; pass no reduction= beside it")
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise UsageError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy, self.lazy_bucket_allocation = batched_grad_copy, lazy_bucket_allocation
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.static_graph = False
        self._init_torch_attributes(module, check_reduction, delay_all_reduce_named_params or ())
        init_sync_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._join_group(transport, process_group, device_mesh, timeout)
        given = {
            "reduction=": reduction is not None,
            "mixed_precision=": mixed_precision is not None,
            "overlap=False": not overlap,
            'optimize_ddp="python_reducer"': self._use_python_reducer,
        }
        arguments.check_lanes(lanes, seed, self._transport.size, module, **given)
        self._lane_count, self._seed = lanes, seed
        if lanes is not None:
            self.forward_sync_buffers = False  # they have a rule of their own: replica/lane_buffers.py
        self._settings = ReducerSettings(
            caps=BucketCaps.from_mib(bucket_cap_mb, bucket_cap_mb_list),
            plans_buckets=bucket_plan == "auto"
            and bucket_cap_mb is None
            and not bucket_cap_mb_list
            and len({param.device for param in module.parameters()}) <= 1,  # times of two devices do not compare
            overlap=overlap,
            unused=unused,
            skip_unused=skip_all_reduce_unused_params,
            hold=mixed_precision is not None,
        )
        self._reduction: Reduction = reduction or Mean()
        self._guard_refuses = guard
        self._agreement = agreement or (Agreement() if guard else None)

        if init_sync:
            self._check_same_model(init)
        self._manage(device_ids, output_device)
        if init_sync:
            self._start_equal(init, init_sync_buffers)
        if lanes is not None:
            start_equal.warn_of_kernels(kernel_settings(self.device), self._transport, timeout)
        self._build()
        if static_graph:
            self._set_static_graph()

    # ---- construction, step by step

    def _join_group(
        self, transport: str | Transport, process_group: Any, device_mesh: Any, timeout_s: float | None
    ) -> None:
        """Have a group of this replica's own, over the ranks of `process_group`. All of them call it."""
        if isinstance(transport, str):
            self._transport_choice: str | None = transport
            found = self._own_transport(self._shared_transport(process_group, device_mesh), timeout_s)
        else:
            self._transport_choice = None  # it was given, and cannot be chosen again
            of_transport = transport.group if isinstance(transport, TorchDistTransport) else None
            self.process_group = of_transport if process_group is None else process_group
            found = self._own_transport(transport, timeout_s)
        self._group = Group(found, timeout_s, owned=found is not transport)
        weakref.finalize(self, self._group.close)

    def _shared_transport(self, process_group: Any, device_mesh: Any) -> Transport:
        """The group that the user has, as a transport."""
        self.process_group = arguments.choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            if arguments.is_sliced(device_mesh):
                from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

                _pre_dp_module_transform(self.module)
        # A group defined in Python may do something even for one rank, so it is always asked.
        stock = type(self.process_group) is torch.distributed.ProcessGroup
        alone = self._transport_choice == "local" or (stock and self.process_group.size() == 1)
        return LocalTransport() if alone else TorchDistTransport(self.process_group)

    def _own_transport(self, shared: Transport, timeout_s: float | None) -> Transport:
        """A transport over the same ranks that the collectives of this replica alone go over."""
        if not isinstance(shared, TorchDistTransport):
            return shared.apart(timeout_s)
        devices = {param.device for param in self.module.parameters()}
        if self._transport_choice is None:
            return shared.apart(timeout_s, devices).connect()
        return choose(shared, self._transport_choice, devices, timeout_s)

    def _move_to_group(self, process_group: Any) -> None:
        """Go on over the ranks of another process group; None: of the default one. All of them call it."""
        timeout_s = self._group.timeout_s
        self._group.move(self._own_transport(self._shared_transport(process_group, None), timeout_s))

    def _check_same_model(self, init: str) -> None:
        ignored = self.parameters_to_ignore
        named: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in self.module.named_parameters() if n not in ignored]
        named += [(n, b) for n, b in self.module.named_buffers() if n not in ignored]
        s = self._settings
        settings = {
            "init": init,
            "overlap": s.overlap,
            "unused": s.unused,
            "bucket sizes": s.caps.caps,
            "bucket_plan": s.plans_buckets,
            "forward_sync_buffers": self.forward_sync_buffers,
            "skip_all_reduce_unused_params": s.skip_unused,
            "mixed_precision": self.mixed_precision,
            "reduction": arguments.describe_reduction(self._reduction),
            "lanes": self._lane_count,
            "seed": self._seed,
            "agreement": self._agreement and self._agreement.describe(),
        }
        start_equal.check_structure(start_equal.describe(named, settings), self._transport, self._group.timeout_s)

    def _manage(self, device_ids: Sequence[Any] | None, output_device: Any) -> None:
        self._managed = arguments.managed_parameters(self.module, self.parameters_to_ignore)
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.device_ids, self.output_device = arguments.choose_devices(
            device_ids, output_device, self._module_parameters
        )
        self._passing_sync_batchnorm_handle(self.module)

    def _start_equal(self, init: str, with_buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        named: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in self.module.named_parameters() if n not in ignored]
        if with_buffers:
            named += [(n, b) for n, b in self.module.named_buffers() if n not in ignored]
        if init == "verify":
            start_equal.verify_values(named, self._transport, self._group.timeout_s)
        else:
            start_equal.broadcast_values([t for _, t in named], self._transport, self._group.timeout_s)

    def _build(self) -> None:
        """Lay out the gradients and hook the parameters; also after unpickling."""
        keep_out_of_graphs()
        self._assign_modules_buffers()
        _show_progress()
        if self._use_python_reducer:
            self._build_for_compiled_autograd()
            return
        managed = self._managed
        metas = [
            ParamMeta(name, tuple(p.shape), tuple(p.stride()), p.dtype, p.device, sparse)
            for name, p, sparse in zip(managed.names, managed.params, managed.sparse, strict=True)
        ]
        layout = plan_layout(metas, self._first_order(), self._settings.caps)
        lanes: Lanes | None = None
        if self._lane_count is not None:
            lanes = Lanes(self._lane_count, self._transport.rank, self._transport.size)
            self._reduction = LaneSum(self._lane_count, self._transport, self.device)
        self._core = Reducer(managed.params, layout, self._group, self._reduction, self._settings, lanes)
        if lanes is not None:
            self._lane_loop = LaneLoop(self._core, self.module, self.parameters_to_ignore, self._seed, self.device)
        self._oversee()
        self._gate = self._make_gate()
        ids = frozenset(id(p) for p in managed.params)
        ignored = frozenset(self.parameters_to_ignore)
        guard = StepGuard(self._core, self, ids, ignored, refuses=self._guard_refuses, gate=self._gate)
        self.reducer = TorchReducer(self._core)
        self._closing = weakref.finalize(self, _close, self._core, guard)
        recording = recording_asked(self.module, lanes) if self._transport.size == 1 else None
        if lanes is not None:
            self._lane_loop.recording = recording
        self._narrow: NarrowParameters | None = None
        if self.mixed_precision is not None:
            config = self.mixed_precision
            self._narrow = NarrowParameters(self._module_parameters, config.param_dtype)
            self._core.reduction = reduction_for(config, managed.params)
            if isinstance(self._core.oversight, Overseer):
                self._core.oversight.wide = self._narrow.wide
            self._core.on_finished = self._narrow.widen
            hooks = self._narrow.widen_before_state_is_read(self.module)
            weakref.finalize(self, _remove, hooks)
            cast_buffers(self.module, config.buffer_dtype, self.parameters_to_ignore)

    def _oversee(self) -> None:
        """Have capsules and an oversight, as far as they were asked for and there is anything to look after."""
        agreement, core = self._agreement, self._core
        self._capsules: CapsuleWriter | None = None
        buffers = self._lane_loop.buffers if self._lane_count is not None else None
        if agreement is None:
            return
        if agreement.capsules is not None:
            self._capsules = CapsuleWriter(agreement, core, self.module, self._seed, self.device, buffers)
            if self._lane_count is not None:
                self._lane_loop.capsules = self._capsules
        if not self._transport.alone or agreement.not_finite != "keep":
            params = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
            overseer = Overseer(agreement, params, self._group, buffers, adds=self._lane_count or 1)
            overseer.only_adds = lambda: isinstance(core.reduction, Mean | FixedOrder | LaneSum)
            overseer.on_finding = None if self._capsules is None else self._capsules.on_finding
            core.oversight = overseer

    def _make_gate(self) -> UpdateGate:
        """What keeps optimizers on a device from using gradients that they must not use."""
        names = {id(p): name for name, p in zip(self._managed.names, self._managed.params, strict=True)}
        overseer = self._core.oversight
        gate = UpdateGate(self._core, names, looks=overseer is not None and overseer.looks_at_sums)
        if isinstance(overseer, Overseer):
            overseer.bad_in = gate.bad_in
            gate.on_looked = overseer.hear_alone if self._transport.alone else None
        return gate

    def _first_order(self) -> list[int]:
        """Backward visits parameters in about the reverse order of registration; delayed ones come last."""
        delayed = {id(p) for p in self._delay_all_reduce_params}
        order = list(reversed(range(len(self._managed.params))))
        return sorted(order, key=lambda i: id(self._managed.params[i]) in delayed)

    # ---- a step

    # forward() is torch's: it calls the three methods below, and torch.compile knows it by its file.

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            # torch's way tells torch.compile to split graphs at buckets: if it is there, and there are buckets.
            split = "torch._dynamo" in sys.modules and (self._use_python_reducer or not self._core.is_alone())
            return super()._run_ddp_forward(*inputs, **kwargs) if split else self.module(*inputs, **kwargs)
        except BaseException as error:
            if self._narrow is not None:
                self._narrow.widen()
            if self._capsules is not None and isinstance(error, Exception):
                self._capsules.on_crash(error)
            raise

    def train(self, mode: bool = True) -> Self:
        """As torch's. A launcher is told of evaluations, so that it does not take them for a hang."""
        if mode:
            own_progress().end_evaluation()
        else:
            own_progress().note(Phase.EVALUATE)
        super().train(mode)
        return self

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._use_python_reducer:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._lazy_init()
        if self._group_is_gone:
            rejoin.rejoin(self)
        if torch.is_grad_enabled():
            self._before_training_forward()
        core = self._core
        core.before_forward(grads=torch.is_grad_enabled(), training=self.training)
        core.trace.stamp(Moment.FORWARD_BEGIN, core.reductions)
        own_progress().note(Phase.FORWARD if self.training and torch.is_grad_enabled() else Phase.EVALUATE)
        if self._capsules is not None and core.lanes is None:
            self._capsules.note_forward(inputs, kwargs)
        if self._join_config.enable or core.divisor != core.everyone:
            self._count_active_ranks()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        core.sync_in_join = None
        if self._join_config.enable:
            core.sync_in_join = self.require_backward_grad_sync
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self._narrow is not None:
            self._narrow.narrow()
        if self.device_ids or self.mixed_precision is not None:
            inputs, kwargs = self._place_inputs(inputs, kwargs)
        return inputs, kwargs

    def _before_training_forward(self) -> None:
        refuse_compiled_autograd()
        if self._joins_later and self.training:  # a rank may evaluate a copy by itself
            rejoin.join_later(self)
        if self._managed.module is not self.module:
            self._managed = self._managed.of(self.module, self.parameters_to_ignore)
        if self._core.sync_on:
            if self.logger.iteration == self.logger.sample_at:
                self.logger.sample(self._core.trace)
            self.logger.iteration += 1

    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer:
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        core = self._core
        grad_enabled = torch.is_grad_enabled()
        self.require_forward_param_sync = grad_enabled and core.sync_on
        if grad_enabled:
            watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            for tensor in watched:
                core.hooks.watch_output(tensor)
            if not watched:
                core.hooks.hang()  # there is no output whose backward could be watched
        elif self._narrow is not None:
            self._narrow.widen()
        core.trace.stamp(Moment.FORWARD_END, core.reductions)
        return output

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: a rank that runs out of data takes part with zeros. As torch's `join`."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    @property
    def layout(self) -> Layout:
        """Where every gradient lives now."""
        return self._core.set.layout

    @property
    def bucket_plan(self) -> Plan | None:
        """How the buckets were cut, and what they were expected to cost. None until the first steps were measured."""
        return self._core.planning.plan

    @property
    def trace(self) -> Trace:
        """What happened when on this rank."""
        return self._core.trace


def _show_progress() -> None:
    """From now on the launcher, if there is one, sees what this rank does."""
    own_progress().begin()
    if torch.distributed.is_initialized():
        own_progress().note_end(lambda: not torch.distributed.is_initialized())


def _close(core: Reducer, guard: StepGuard) -> None:
    guard.close()
    core.hooks.close()


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
