"""The interface of torch's class besides training, which other libraries and torch itself use.

The base class is torch's own, because isinstance() checks of Accelerate, Lightning, torch's checkpointing and
torch.compile require it. Its constructor never runs; `tests/shape` holds the list of its methods that are used as they
are, so that none runs by accident.
"""

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from paceline.collectives.group import Group, finish
from paceline.collectives.protocols import Op, Transport
from paceline.collectives.reduction import GradBucket
from paceline.collectives.reduction_protocol import Reduction
from paceline.collectives.subgroup import ShardGroups
from paceline.collectives.wait import FutureWork
from paceline.errors import IllegalMove, UsageError
from paceline.placement import Placement, placement_of
from paceline.progress import Phase, own_progress
from paceline.reducer.participation import abandon
from paceline.reducer.reducer import Reducer
from paceline.reducer.settings import ReducerSettings
from paceline.replica import arguments, membership, start_equal
from paceline.replica.capsules import CapsuleWriter
from paceline.replica.from_meta import FromMeta
from paceline.replica.join import ReplicaJoinHook
from paceline.replica.lane_loop import LaneLoop
from paceline.replica.logging_data import TorchLogger
from paceline.replica.mixed_precision import NarrowParameters
from paceline.replica.owned import OwnedBlocks
from paceline.strategies.comm_hook import CommHook, waits_in_backward, why_not_in_shards

# Untyped in torch, and some of its attributes are properties here.
TorchDDP: Any = nn.parallel.DistributedDataParallel


class TorchSurface(TorchDDP):  # type: ignore[misc]
    """The part of the drop-in that exists because torch's class has it."""

    if TYPE_CHECKING:
        _core: Reducer
        logger: TorchLogger
        _transport_choice: str | None  # None: a Transport was given
        _group: Group
        _settings: ReducerSettings
        _reduction: Reduction
        _managed: arguments.Managed
        _lane_count: int | None
        _placement: Placement
        _reduce_dtype: torch.dtype | None
        _agreement: Any

    # Not made where torch.compile has chosen torch's own Python reducer.
    _lane_loop: LaneLoop | None = None
    _narrow: NarrowParameters | None = None
    _prepare_parameters: Callable[[], None] | None = None  # called before every forward
    _capsules: CapsuleWriter | None = None
    _owned: OwnedBlocks | None = None
    _shard_groups: ShardGroups | None = None
    _from_meta: FromMeta | None = None
    _in_default_group = False  # and so in its successor
    _group_is_gone = False  # see membership.py
    _in_generations = False  # of an elastic job: its group is that of the generation, and before the first it is alone
    _built_alone = False  # whether its parts were made for a group of one rank
    _close_shard_groups: Callable[[], None] | None = None
    _joins_later = False  # a copy that has not been trained yet

    if TYPE_CHECKING:

        def _build(self) -> None: ...

    @property
    def _transport(self) -> Transport:
        return self._group.transport

    def _init_torch_attributes(self, module: nn.Module, check_reduction: bool, delayed: Iterable[Any]) -> None:
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delay_all_reduce_params = [param for _, param in delayed]
        # Importing dynamo takes a second; if it is not imported, or another thread is importing it, no one can have
        # chosen the mode.
        mode = getattr(sys.modules.get("torch._dynamo.utils"), "get_optimize_ddp_mode", None)
        self._use_python_reducer = mode is not None and mode() == "python_reducer"
        self._python_reducer_syncs = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = start_equal.CHUNK_BYTES
        self.use_side_stream_for_tensor_copies = True
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._delay_all_reduce_all_params = False  # asked by torch's forward
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._accum_grad_hooks: list[Any] = []
        self.logger = TorchLogger()
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using "
                "it.",
                FutureWarning,
                stacklevel=3,
            )

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

    def _choose_buffer_sync(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
        """Set `forward_sync_buffers`; returns whether buffers are also made equal at the start."""
        if broadcast_buffers is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. Unlike "
                "broadcast_buffers=False, forward_sync_buffers=False still makes buffers equal once, at the start."
                if forward_sync_buffers is None
                else "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is "
                "deprecated and its value is ignored when `forward_sync_buffers` is provided.",
                FutureWarning,
                stacklevel=3,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = broadcast_buffers is None or broadcast_buffers
        return self.forward_sync_buffers

    # ---- names that torch computes in its constructor

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def static_graph(self) -> bool:
        return self._settings.static_graph

    @property
    def bucket_bytes_cap(self) -> int:
        return max(self._settings.caps.caps)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        return list(self._settings.caps.caps) if self._settings.caps.listed else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        return self._settings.caps.caps[0] < self.bucket_bytes_cap and not self._settings.caps.listed

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._core.planning.order_learned

    # ---- torch 2.15 can leave the end of the reduction to the caller; here backward always ends it

    @property
    def require_manual_backward_finalization(self) -> bool:
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()

    @property
    def should_finalize_after_backward(self) -> bool:
        return False

    def finalize_backward(self) -> None:
        self._check_manual_backward_finalization_supported()

    def _check_manual_backward_finalization_supported(self) -> None:
        raise UsageError(
            "paceline ends the reduction inside backward and cannot leave that to the caller; to reduce at a time of "
            "your choice, run backward inside no_sync() and call sync_gradients()"
        )

    # ---- copies and pickles: without what belongs to this process

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_in_shards("copying or pickling a replica")
        self._refuse_with_transport("cannot be copied or pickled")
        self._check_default_group()
        attrs = copy.copy(self.__dict__)
        attrs["_timeout_s"] = self._group.timeout_s
        made_anew = ("process_group", "reducer", "logger", "_core", "_closing", "_group", "_managed", "_gate")
        for name in (*made_anew, "_lane_loop", "_capsules", "_prepare_parameters"):
            attrs.pop(name, None)
        return attrs

    def __setstate__(self, state: dict[str, Any]) -> None:
        timeout_s = state.pop("_timeout_s")
        nn.Module.__setstate__(self, state)
        self.__dict__.pop("broadcast_buffers", None)
        self.logger = TorchLogger()
        # A rank may make a copy for itself, such as an average of weights that is only evaluated. So a copy has
        # no group of its own until it is trained, which all ranks do: see membership.py.
        self._group = Group(membership.users_transport(self), timeout_s)
        self._joins_later = not self._group.single
        weakref.finalize(self, self._group.close)
        self._manage(self.device_ids, self.output_device)
        self._build()

    # ---- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future[Tensor]` combine the buckets. Once, before the first backward.

        torch's own hooks work. The bucket has the methods of `torch.distributed.GradBucket`. Gradients come undivided.
        """
        self._check_comm_hook(hook)
        self._refuse_in_lanes("a communication hook")
        if self._reduce_dtype is not None:
            raise UsageError(
                f"a communication hook cannot be combined with reduce_dtype={self._reduce_dtype}: it decides in which "
                f"type gradients are summed; leave reduce_dtype= out"
            )
        why = why_not_in_shards(hook)
        self._refuse_in_shards(f"the communication hook {hook.__qualname__}, which {why},", given=bool(why))
        if waits_in_backward(hook):
            self._refuse_in_units(f"the communication hook {hook.__qualname__}, which waits for others in backward,")
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(hook.__qualname__)
        if self._use_python_reducer:
            return
        if isinstance(self._core.schedule.reduction, CommHook):
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._core.schedule.reduction = CommHook(state, hook)
        if self._core.schedule.observer is not None:
            self._core.schedule.observer.stop_comparing()  # replicas may well differ by design, as with local SGD

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _lazy_init(self) -> None:
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    # ---- the static graph, and moves to another group

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if not self._use_python_reducer and self._core.reductions_begun:
            message = "Static graph should be set: _set_static_graph() should be called before training loop starts."
            self._core.last_error = message
            raise IllegalMove(message)
        self._settings.static_graph = True

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue in another group; the next reduction learns the order of gradients again."""
        self._refuse_with_transport("cannot move to another process group")
        self._refuse_in_shards("moving to another process group")
        abandon(self._core)
        if new_process_group != dist.GroupMember.NON_GROUP_MEMBER:
            membership.move(self, new_process_group, compares=False)

    def _refuse_with_transport(self, what: str) -> None:
        if self._transport_choice is None:
            raise IllegalMove(
                f"a replica that was given a Transport object {what}, because only the code that created the transport "
                f'can create another one; wrap with a name, such as transport="torch", or wrap the bare module again'
            )

    def _remove_autograd_hooks(self) -> None:
        self._core.hooks.close()

    def _check_reducer_finalized(self) -> None:
        """In torch, whether the last backward was reduced. Here it always is, unless it has raised."""

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """A hint for torch's sparse reduction; this one needs none."""

    # ---- settings that frameworks change

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for `do_sync`."""
        return self._core.sync_on if not self._use_python_reducer else self._python_reducer_syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._use_python_reducer:
            self._python_reducer_syncs = value
        else:
            self._core.sync_on = value

    def train(self, mode: bool = True) -> Self:
        """As torch's. The launcher is informed of evaluations, so that it does not mistake them for a hang."""
        if mode:
            own_progress().end_evaluation()
        else:
            own_progress().note(Phase.EVALUATE)
        super().train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; under a sharded placement also this rank's shards."""
        if self._owned is not None:
            self._owned.zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none)

    # ---- buffers and uneven inputs

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

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        start_equal.broadcast_values(tensors, self._group, root=authoritative_rank)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The largest rank for which `rank_cond` holds."""
        candidate = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        self._group.wait(self._transport.all_reduce(candidate, Op.MAX), "the choice of a rank to follow")
        chosen = int(candidate.item())
        assert chosen >= 0, "some rank is always eligible"
        return chosen

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        """Inside join(): whether the ranks that still have data reduce in this step."""
        wants = 0.0 if is_joined_rank or not self.require_backward_grad_sync else 1.0
        flag = torch.full((1,), wants, dtype=torch.float32, device=self.device)
        self._group.wait(self._transport.all_reduce(flag), "the choice to reduce inside join()")
        return bool(flag.item() != 0)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        root = self._authoritative_rank = self._find_common_rank(self._transport.rank, is_last_joiner)
        tensors: list[torch.Tensor] = list(self._module_parameters)
        if self.forward_sync_buffers:
            tensors += [b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]
        start_equal.broadcast_values(tensors, self._group, root=root)

    def join_hook(self, **kwargs: Any) -> ReplicaJoinHook:
        """The work of a rank that has run out of data. As torch's `join_hook`."""
        self._refuse_in_lanes("join()")
        self._refuse_in_shards("join()")
        self.logger._set_uneven_input_join()
        divide = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaJoinHook(self, divide_by_initial_world_size=divide)

    def _choose_placement(self, name: str, shard: int | None, copies: int | None, units: Any) -> None:
        if copies is not None and copies == self._group.size and not self._in_generations:
            shard, copies = 1, None  # each rank holds all, in a world that stays as it is
        self._placement, self._units = placement_of(name, shard, copies), units
        self._shard, self._copies = shard, copies

    def _check_placement(self) -> None:
        """Refuse, before anything is started, what sharded placements do not support."""
        if not self._placement.shards_optimizer:
            return
        self._refuse_in_shards("mixed_precision=", given=self.mixed_precision is not None)
        self._refuse_in_shards("a module on several devices", given=self.is_multi_device_module)
        self._refuse_in_shards('optimize_ddp="python_reducer"', given=self._use_python_reducer)
        if self._lane_count is not None and self._lane_count % self._transport.size:
            self._refuse_in_units(f"lanes={self._lane_count} over {self._transport.size} ranks")
        if getattr(self._agreement, "capsules", None) is not None:
            self._refuse_in_units("Agreement(capsules=...)")
        checks = getattr(self._agreement, "not_finite", "keep") != "keep"
        self._refuse_in_shards("not_finite= on a GPU", given=checks and self.device_type == "cuda")
        in_backward = any(hasattr(param, "_in_backward_optimizers") for param in self._module_parameters)
        self._refuse_in_shards("an optimizer that steps inside backward", given=in_backward)

    def _refuse_in_shards(self, what: str, *, given: bool = True) -> None:
        if given and self._placement.shards_optimizer:
            raise UsageError(f'{what} cannot be combined with placement="{self._placement.name}"; use placement="ddp"')

    def _refuse_in_units(self, what: str) -> None:
        if self._placement.shards_parameters and not (self._group.single and not self._in_generations):
            raise UsageError(
                f'{what} cannot be combined with placement="zero3", where all ranks gather the same parameters at the '
                f'same time; use placement="zero2"'
            )

    def _refuse_in_lanes(self, what: str) -> None:
        if self._lane_count is not None:
            raise UsageError(
                f"{what} cannot be combined with lanes={self._lane_count}: its sums depend on the number of ranks"
            )

    def _count_active_ranks(self) -> None:
        """Inside join(): report that this rank has data, and divide by the number that have, if requested."""
        work = Join.notify_join_context(self)
        self._core.divisor = self._core.batch.count
        if work is not None and not self._divide_by_initial_world_size:
            future = work.get_future()
            self._group.wait(FutureWork(future), "the count of ranks that have data")
            (active,) = future.value()
            self._core.divisor = float(active.item())

    def _place_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move the inputs to this replica's device, and cast them under mixed precision."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = dist.utils._to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = dist.utils._cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    # ---- torch.compile with optimize_ddp="python_reducer"

    def _build_for_compiled_autograd(self) -> None:
        """Compiled autograd traces hooks into the graph, so the hooks must be torch's plain functional ones."""
        torch._inductor.config._fuse_ddp_communication = True
        torch._inductor.config._fuse_ddp_bucket_size = self.bucket_bytes_cap // (1024 * 1024)
        self._register_accum_grad_hook()

    # ---- what torch reports about itself

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.logger.data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.sample_every(sample_rate)


class TorchReducer:
    """`model.reducer` as code written for torch's C++ reducer knows it."""

    def __init__(self, core: Reducer) -> None:
        self._core = core

    def _rebuild_buckets(self) -> bool:
        return self._core.apply_pending_layout()

    def prepare_for_forward(self) -> None:
        self._core.before_forward(grads=True, training=True)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """torch must be told which outputs a reduced backward starts from; here parameters' own hooks tell."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Any]":
        """The sum of a bucket over all ranks, undivided."""
        transport = self._core.transport
        finish(transport.all_reduce(bucket.buffer()), what=f"bucket {bucket.index()}", watch=transport.watch)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([bucket.buffer()])
        return future

    def _get_local_used_map(self) -> torch.Tensor:
        """The number of ranks on which each parameter took part in the last reduction."""
        count = len(self._core.bucket_set.layout.params)
        uses = self._core.uses or [self._core.transport.size] * count
        return torch.tensor(uses, dtype=torch.int32, device=self._core.bucket_set.layout.params[0].device)

    def _install_post_backward_futures(self, futures: "list[torch.futures.Future[Any]]") -> None:
        self._core.after_backward.extend(futures)

    def _set_optimizer_in_backward(self) -> None:
        self._core.optimizes_in_backward = True

    def _ddp_graph_static(self) -> bool:
        return not self._core.graph.changed

    def _check_reducer_finalized(self) -> None:
        """See TorchSurface._check_reducer_finalized."""

    def _remove_autograd_hooks(self) -> None:
        self._core.hooks.close()
