"""The drop-in: torch's DistributedDataParallel, with paceline's reducer inside."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import Optimizer

from paceline.bucket_plan import Plan
from paceline.collectives.protocols import Transport
from paceline.collectives.reduction import Mean
from paceline.collectives.reduction_protocol import Reduction
from paceline.errors import UsageError
from paceline.kernels import kernel_settings
from paceline.layout import BucketCaps, Layout
from paceline.placement import placement_of
from paceline.reducer.lane_batch import LaneBatch
from paceline.reducer.participation import reduce_now, skip
from paceline.reducer.report import Vote
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.unreduced import has_foreign
from paceline.reducer.weighting import weighted
from paceline.replica import arguments, from_meta, membership, start_equal
from paceline.replica.agreement import Agreement
from paceline.replica.assembly import assemble, metas_of
from paceline.replica.forward import after_module, before_module, run_module
from paceline.replica.lane_loop import Microbatch, step_of
from paceline.replica.owned import clip_whole_in_lanes
from paceline.replica.sharded_optimizer import make_optimizer
from paceline.replica.torch_surface import TorchReducer, TorchSurface
from paceline.replica.unit_forward import ForwardInUnits
from paceline.replica.untraced import keep_out_of_graphs
from paceline.trace import Trace


class DistributedDataParallel(TorchSurface):
    """Keep one replica of `module` per rank equal, by averaging gradients while backward runs.

    Takes every argument of `torch.nn.parallel.DistributedDataParallel` with torch's meaning, and:

    Args:
        init: "broadcast" starts every replica from rank 0's values; "verify" overwrites nothing and raises
            `ReplicasDiffer` on every rank when values differ.
        overlap: reduce buckets while backward runs. With False, call `sync_gradients()` after backward.
        transport: "auto" takes shared memory for CPU tensors of ranks that share a host ("shm"), shared memory inside
            hosts and torch.distributed between them ("two-level"), and torch.distributed otherwise ("torch").
            Or a `Transport`. If set, the environment variable PACELINE_TRANSPORT overrides "auto".
        reduction: how a bucket is combined; the mean by default.
        reduce_dtype: the type in which gradients are summed, such as torch.float32 for a bfloat16 model, under every
            placement. The result is rounded once, to the type of the gradient. None: the transport decides.
        bucket_plan: "auto" measures the first steps and cuts the buckets so that the last one is reduced soonest;
            "fixed" keeps torch's sizes, as do `bucket_cap_mb` and `bucket_cap_mb_list`.
        unused: "zero" accepts parameters that a backward does not use; "error" raises on every rank.
        guard: refuse optimizer steps on gradients that were never reduced.
        timeout: seconds after which a wait for another rank is an error. None: the process group's own timeout.
        placement: what each rank keeps: "ddp" everything, "zero1" its shards of the optimizer state, "zero2"
            also of the gradients, "zero3" also of the parameters. Create the optimizer with
            `model.optimizer()`.
        shard: how many consecutive ranks, such as those of one host, share one set of shards; it must divide the
            number of ranks. The next ranks hold the same shards again. None: all ranks; 1: as "ddp".
        copies: alternative to `shard`: how many ranks hold each shard, in any world whose size this divides. With
            2 an elastic job (`paceline.Elastic`) may lose any one rank.
        units: for "zero3", the modules, or classes of them, whose parameters are gathered and freed together. None: the
            repeated blocks of the model.
        lanes: give the same bits in a world of any size up to this number: see `lanes()`. None: the environment
        variable
            PACELINE_LANES, or no lanes.
        seed: the seed for random numbers inside lanes.
        agreement: what ranks check about each other in every step; see `Agreement`. None: its defaults, or no checks
        with
            `guard=False`.

    Example:
        >>> model = paceline.DistributedDataParallel(net)
        >>> loss = model(x).sum(); loss.backward()   # gradients are now the mean over all ranks
    """

    def __new__(cls, *_: Any, **given: Any) -> Self:
        arguments.refuse_elsewhere_known(given)
        made: Self = super().__new__(cls)
        return made

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
        reduce_dtype: torch.dtype | str | None = None,
        bucket_plan: str = "auto",
        unused: str = "zero",
        guard: bool = True,
        timeout: float | None = None,
        placement: str = "ddp",
        shard: int | None = None,
        copies: int | None = None,
        units: Sequence[type[nn.Module] | nn.Module] | None = None,
        lanes: int | None = None,
        seed: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        transport, lanes = arguments.or_from_environment(transport, lanes)
        arguments.check_module(module, placement_of(placement, shard, copies), device_mesh)
        arguments.check_choices(init=init, unused=unused, bucket_plan=bucket_plan)
        arguments.check_objects(timeout=timeout, transport=transport, reduction=reduction)
        arguments.check_together(mixed_precision, reduction, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._reduce_dtype = arguments.check_reduce_dtype(reduce_dtype, mixed_precision, reduction, lanes)
        self.module, self.dim = module, dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy, self.lazy_bucket_allocation = batched_grad_copy, lazy_bucket_allocation
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self._init_torch_attributes(module, check_reduction, delay_all_reduce_named_params or ())
        init_sync_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._start_device = from_meta.device_of(module, device_ids, process_group or dist.group.WORLD)
        self._transport_choice = transport if isinstance(transport, str) else None  # None: a Transport object was given
        self._group = membership.join(self, transport, process_group, device_mesh, timeout)
        given = {
            "reduction=": reduction is not None,
            "mixed_precision=": mixed_precision is not None,
            "overlap=False": not overlap,
            'optimize_ddp="python_reducer"': self._use_python_reducer,
        }
        arguments.check_lanes(lanes, seed, self._transport.size, module, **given)
        self._lane_count, self._seed = lanes, seed
        self._choose_placement(placement, shard, copies, units)
        if lanes is not None:
            self.forward_sync_buffers = False  # they follow other rules: replica/lane_buffers.py
        caps = BucketCaps.from_mib(bucket_cap_mb, bucket_cap_mb_list)
        several = len({param.device for param in module.parameters()}) > 1  # times of two devices are not comparable
        in_turn = self._placement.shards_gradients  # two buckets have memory at a time, so they should not be large
        self._settings = ReducerSettings(
            caps=caps,
            plans_buckets=bucket_plan == "auto" and not (caps.given or several or in_turn),
            keeps_layout=self._placement.shards_parameters,
            report_last=self._placement.shards_optimizer and self._in_generations,
            overlap=overlap,
            unused=unused,
            skip_unused=skip_all_reduce_unused_params,
            hold=mixed_precision is not None,
        )
        self._reduction: Reduction = reduction or Mean()
        self._guard_refuses = guard
        self._agreement = agreement or (Agreement() if guard else None)
        if init_sync:
            start_equal.check_same_model(self, init)
        self._from_meta = from_meta.begin(self)
        self._manage(device_ids, output_device)
        self._check_placement()
        self._shard_groups = membership.form_shard_groups(self)
        if init_sync:
            start_equal.make_equal(self, init, with_buffers=init_sync_buffers)
        if lanes is not None:
            start_equal.warn_of_kernels(kernel_settings(self.device), self._group)
        self._build()
        from_meta.fill(self)
        if static_graph:
            self._set_static_graph()

    # ---- construction, step by step

    def _build(self) -> None:
        """Lay out the gradients and hook the parameters; also called after unpickling."""
        keep_out_of_graphs()
        self._assign_modules_buffers()
        if self._use_python_reducer:
            self._build_for_compiled_autograd()
            return
        built = assemble(self)
        self._built_alone = self._group.single
        self._core, self._gate, self._lane_loop = built.core, built.gate, built.lane_loop
        self._narrow, self._capsules, self._owned = built.narrow, built.capsules, built.owned
        self._prepare_parameters = built.prepares()
        if built.owned is not None and built.owned.units is not None:
            self.forward = ForwardInUnits(self)
        self.reducer = TorchReducer(self._core)
        self._closing = weakref.finalize(self, built.closer())

    # ---- a step

    # forward() is torch's, and calls these three: see forward.py.
    _pre_forward = before_module
    _run_ddp_forward = run_module
    _post_forward = after_module

    def optimizer(
        self,
        optimizer: type[Optimizer] | Optimizer,
        params: Any = None,
        *,
        master: torch.dtype | str | None = None,
        **options: Any,
    ) -> Optimizer:
        """An optimizer over the part of the model that this rank owns: all of it, or its shards under a sharded
        placement.

        Pass a class and its options, with `params` as the class takes them (default: all trained parameters), or an
        optimizer that was created from `model.parameters()` and has not stepped yet. To schedulers, GradScaler and
        checkpoints it is an ordinary optimizer; `state_dict()` is that of whole parameters, and a collective.
        `master="float32"` keeps and updates the weights of a bfloat16 or float16 model in that type too.

        Example:
            >>> model = paceline.DistributedDataParallel(net, placement="zero1")
            >>> optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)
        """
        wide = None if master is None else arguments.floating_type("master", master)
        return make_optimizer(self, optimizer, params, options, wide)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """torch's `clip_grad_norm_` for the parameters of this replica, under every placement. All ranks call it.

        In lanes the norm has the same bits in every world and under every placement.
        """
        max_norm, norm_type, in_lanes = float(max_norm), float(norm_type), self._lane_count is not None
        if self._owned is not None and self._owned.cut:
            return self._owned.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, in_lanes=in_lanes)
        params = self._managed.params
        if in_lanes:
            return clip_whole_in_lanes(params, metas_of(self), self._group, max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the full parameters, so that they can be read or changed, under every placement. All ranks must enter
        it, and must make the same changes."""
        if self._owned is not None and self._owned.gathers is not None:
            self._owned.gathers.wait()
        if self._owned is None or self._owned.units is None:
            yield
            return
        with self._owned.units.whole():
            yield

    def whole_among(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks hold the whole state of a step between them: every shard of it, or all of it on one rank.

        This only concerns the placement. Whether a rank is in the middle of an update is known only to that rank.

        Example:
            >>> model = paceline.DistributedDataParallel(net, placement="zero3", shard=2)  # on 4 ranks
            >>> model.whole_among([0, 3]), model.whole_among([1, 3])
            (True, False)
        """
        known, size = set(ranks), self._group.size
        if strange := sorted(rank for rank in known if not 0 <= rank < size):
            raise UsageError(f"whole_among() was given rank {strange[0]}; expected ranks of the group, 0 to {size - 1}")
        return bool(known) if self._owned is None else self._owned.ownership.whole_among(known)

    # ---- what a step is made of

    def sync_gradients(self) -> None:
        """Reduce the accumulated gradients, without another forward.

        Needed after backward with `overlap=False`, and after backwards that ran inside `no_sync()`. Does nothing while
        synchronisation is switched off, nor with `overlap=True` when everything is reduced already.
        """
        core = self._core
        if isinstance(core.batch, LaneBatch):
            core.batch.sync()
            return
        reduced = self._settings.overlap and core.step_state.reductions_since_step and not core.step_state.window_open
        if core.sync_on and (not reduced or core.others_wait() or has_foreign(core.bucket_set)):
            reduce_now(core, by_hand=True)

    # ---- when to reduce

    @property
    def do_sync(self) -> bool:
        """Whether the next backward reduces gradients."""
        return self.require_backward_grad_sync

    def enable_grad_sync(self) -> None:
        """Reduce gradients in the backwards that follow."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """Only accumulate gradients in the backwards that follow."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them. What matters is where backward runs, not forward.

        Example:
            >>> with model.no_sync():
            ...     model(a).sum().backward()   # accumulates
            >>> model(b).sum().backward()       # reduces both
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        if not self._use_python_reducer:
            self._core.step_state.local_steps += 1
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            if not self._use_python_reducer:
                self._core.step_state.local_steps -= 1

    @contextmanager
    def weight(self, weight: float | torch.Tensor) -> Iterator[None]:
        """Weigh the backwards inside: gradients become the exact mean over all tokens of all ranks and microbatches.

        Pass the number of tokens (or samples) that the loss is a mean over. All microbatches of a step, on all ranks,
        must run inside `weight(...)`.

        Example:
            >>> with model.weight(n_tokens):
            ...     loss.backward()
        """
        with weighted(self._core, arguments.weight_of(weight, self._managed.params)):
            yield

    def lanes(self, microbatches: Iterable[Microbatch], step: int) -> Iterator[Microbatch]:
        """Run this rank's lanes of one step, for the same bits in every world.

        A global batch is `lanes` microbatches. A rank runs some of them, one after another, each in its own iteration
        of the loop: with random numbers that follow from (seed, step, lane), from the same buffers, and with gradients
        that are added in the order of one tree over lane numbers. So 1, 2, 3 or `lanes` ranks give equal bits, as long
        as the kernels do: the same number of threads on every rank, deterministic algorithms.

        `step` is the number of the step, counted from 0 or from where a resumed run continues; it seeds the random
        numbers. A rank that leaves the loop with an error informs the others when it calls `lanes()` again, or ends;
        they wait until then. A step whose backward has raised cannot be repaired inside the loop: catch the error
        outside it.

        Example:
            >>> model = paceline.DistributedDataParallel(net, lanes=8, seed=7)
            >>> for step, microbatches in enumerate(paceline.Loader(data, batch_size=4, lanes=8)):
            ...     for x, y in model.lanes(microbatches, step):
            ...         loss_fn(model(x), y).backward()
            ...     optimizer.step(); optimizer.zero_grad()
        """
        if self._lane_count is None:
            raise UsageError("this replica has no lanes; wrap with DistributedDataParallel(module, lanes=8)")
        if self._group_is_gone:
            membership.rejoin(self)
        assert self._lane_loop is not None
        return self._lane_loop.run(microbatches, step_of(step))

    @property
    def repeats_lane(self) -> bool:
        """Whether the loop over `lanes()` currently repeats a lane of another rank, for `Agreement(audit_every=...)`.

        That lane comes after this rank's own lanes, and only its gradients are used, for comparison. The body of
        the loop must treat it like any other, but exclude it from its own sums.

        Example:
            >>> for x in model.lanes(microbatches, step):
            ...     loss = model(x).square().mean(); loss.backward()
            ...     if not model.repeats_lane:
            ...         total += loss.detach()
        """
        return self._lane_loop is not None and self._lane_loop.repeats

    @property
    def own_lanes(self) -> range:
        """The lanes that this rank runs."""
        return range(0) if self._core.batch.lanes is None else self._core.batch.lanes.mine

    def skip_batch(self) -> None:
        """Exclude this rank's batch (or the current lane) from the mean; call it instead of forward and backward.

        Other ranks need not wait: gradients become the mean over ranks that had a batch. If none had one, they
        stay empty.
        """
        core = self._core
        self._refuse_in_units("skip_batch()")
        if isinstance(core.batch, LaneBatch):
            core.batch.skip()
            return
        if not core.step_state.forwards_pending and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()  # as in the forward of the others
        if core.sync_on:  # otherwise the others only accumulate, too
            skip(core)
        self.require_forward_param_sync = core.sync_on

    def vote(self, *, stop: bool = False, save: bool = False, exhausted: bool = False) -> None:
        """Send a vote to all ranks with the next reduction; afterwards `votes` holds the result on every rank."""
        for said, vote in ((stop, Vote.STOP), (save, Vote.SAVE), (exhausted, Vote.EXHAUSTED)):
            self._core.reports.votes |= vote if said else Vote.NOTHING

    @property
    def votes(self) -> dict[str, list[int]]:
        """Which ranks voted "stop", "save" or "exhausted" in the last reduction."""
        gathered = self._core.reports.gathered_votes
        asked = (Vote.STOP, Vote.SAVE, Vote.EXHAUSTED)
        return {str(v.name).lower(): [r for r, vote in enumerate(gathered) if v in vote] for v in asked}

    # ---- inspection

    @property
    def layout(self) -> Layout:
        """The current place of every gradient."""
        return self._core.bucket_set.layout

    @property
    def bucket_plan(self) -> Plan | None:
        """The partition into buckets and its expected cost. None until the first steps were measured."""
        return self._core.planning.plan

    @property
    def trace(self) -> Trace:
        """The timeline of events on this rank."""
        return self._core.trace
