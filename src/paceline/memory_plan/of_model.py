"""The plan of a model that is at hand: states by closed form, activations by following it without memory."""

import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.bare import bare
from paceline.layout import BucketCaps, ParamMeta, plan_layout
from paceline.memory_plan.follow import FollowedStep, Loss, follow, samples_of
from paceline.memory_plan.model_memory import BatchMemory, ModelMemory
from paceline.memory_plan.numbers import PlanError, show_count
from paceline.memory_plan.rank_memory import CUBLAS_BYTES, plan_ranks
from paceline.memory_plan.result import MemoryLine, MemoryPlan
from paceline.memory_plan.setup import TrainingSetup
from paceline.memory_plan.storages import HEAP_BLOCK_BYTES, Height, Timeline, between, highest
from paceline.placement import cut_parameters, find_units, group_by_unit

CUDA_GRANULARITY = 512  # what CUDA's allocator rounds up to
OTHER_SETTINGS = [
    item.name for item in fields(TrainingSetup) if item.name not in ("dtype", "optimizer", "update", "device")
]


def plan(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    foreach: bool | None = None,
    fused: bool | None = None,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    units: Sequence[Any] | None = None,
    **setup: Any,
) -> MemoryPlan:
    """Plan the memory of training `model` before it starts. The model is not touched, and may be on the meta device.

    Args:
        model: the module, wrapped or not. What it does about checkpointing and dropout is planned as it is.
        batch: one microbatch of one rank; a tensor, a tuple (model(*batch)) or a mapping (model(**batch)). Only shapes
            and dtypes matter. Without it the states alone are planned.
        loss: where the model does not return its loss: loss(model(*batch[:-1]), batch[-1]).
        optimizer: a name, or the optimizer itself.
        foreach, fused: as passed to the optimizer; by default torch's own choice.
        dtype: "float32", "bf16" (autocast), "bf16-master" or "bf16-pure"; by default what the parameters have.
        device: "cpu" or "cuda"; by default where the parameters are.
        units: for placement="zero3", as passed to DistributedDataParallel.
        **setup: the other fields of `TrainingSetup`: ranks (one world size, or several; 1 by default), placement,
            shard, copies, transport, lanes and reduce_dtype (as passed to DistributedDataParallel; types by name),
            master (as passed to `model.optimizer`), meta (whether training starts from the meta device; by default
            whether this model is there), accumulate (microbatches of one step), device_memory (bytes, or "24GiB": then
            the plan says whether the model fits and the largest batch that does), link_gbit and backward_s (a rank's
            link and the time of its backward: then the plan says what stays exposed).
    """
    model = bare(model)
    params = list(model.named_parameters())
    if not params:
        raise PlanError(f"model: expected a module with parameters, {type(model).__name__} has none")
    if unknown := setup.keys() - set(OTHER_SETTINGS):
        raise TypeError(f"plan() has no argument {', '.join(sorted(unknown))}; expected {', '.join(OTHER_SETTINGS)}")
    for key in setup.keys() & {"master", "reduce_dtype"}:
        setup[key] = None if setup[key] is None else str(setup[key]).removeprefix("torch.")
    name, update, groups = _optimizer(optimizer, foreach, fused)
    own_device = "cuda" if params[0][1].device.type == "cuda" else "cpu"  # the meta device stands for the CPU
    how = TrainingSetup(
        **{"ranks": 1, "meta": params[0][1].device.type == "meta", **setup},
        dtype=dtype if dtype is not None else _dtype_name(params[0][1]),
        optimizer=name,
        update=update,
        device=own_device if device is None else str(device).split(":")[0],
    )
    cast = None if dtype is None else (torch.float32 if how.precision.parameter == 4 else torch.bfloat16)
    shown = "" if batch is None else f", batch {' and '.join(_shapes(batch))}"
    memory = _model_memory(model, params, how, groups, cast, shown, units)
    if batch is None:
        return plan_ranks(memory, None, None, how, ["activations are not included: pass a batch to follow the model"])
    notes = []
    followed = "cuda" if how.device == "cuda" and torch.cuda.is_available() else "cpu"
    if followed != how.device:
        notes.append("there is no CUDA here, so the kernels of the CPU were followed: CUDA's may keep a little more")
    step = FollowedStep(model, batch, loss, torch.device(followed), cast, how.precision.autocast)
    at_batch = BatchMemories(step, CUDA_GRANULARITY if how.device == "cuda" else 1)
    return plan_ranks(memory, at_batch, samples_of(batch), how, notes)


class BatchMemories:
    """What comes and goes, by batch size. Followed twice at most where sizes grow evenly with the batch."""

    def __init__(self, step: FollowedStep, granularity: int) -> None:
        self._granularity = granularity
        self._own = samples_of(step.batch)
        self._timeline = functools.cache(functools.partial(follow, step))
        self._nbytes = sum(item.nbytes for item in tree_leaves(step.batch) if isinstance(item, torch.Tensor))

    def __call__(self, size: int) -> BatchMemory:
        timeline = self._at(size)
        fresh, steady = (
            highest(timeline, grads_are_copied=copied, granularity=self._granularity) for copied in (False, True)
        )
        inputs = MemoryLine("batch", self._nbytes * size // self._own, "what was given")
        return BatchMemory((_named(fresh),), (_named(steady),), inputs, {})

    def _at(self, size: int) -> Timeline:
        own = self._timeline(self._own)
        if size == self._own:
            return own
        double = self._timeline(2 * self._own)
        if own.same_events(double):
            return between(own, self._own, double, 2 * self._own, size)
        return self._timeline(size)


def _named(height: Height) -> tuple[str, Height]:
    return "backward" if height.in_backward else "forward", height


def _model_memory(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter]],
    how: TrainingSetup,
    groups: Sequence[Sequence[torch.Tensor]],
    cast: torch.dtype | None,
    shown: str,
    units: Sequence[Any] | None,
) -> ModelMemory:
    trained = [(name, param) for name, param in params if param.requires_grad]
    count, trained_count = (sum(param.numel() for _, param in some) for some in (params, trained))
    metas = [ParamMeta(name, tuple(p.shape), p.stride(), _dtype(p, cast), torch.device("meta")) for name, p in trained]
    layout = plan_layout(metas, range(len(metas) - 1, -1, -1), BucketCaps.from_mib(None, None))
    nbytes = sum(meta.nbytes for meta in metas)
    in_heap = sum(meta.numel for meta in metas if meta.nbytes < HEAP_BLOCK_BYTES)
    grouped = groups or [[param for _, param in trained]]
    by_unit = group_by_unit(find_units(model, units), [param for _, param in trained])
    in_units = [sum(metas[index].numel for index in some) for some in by_unit]
    return ModelMemory(
        name=f"{type(model).__name__}, {show_count(count)} parameters{shown}",
        count=count,
        trained=trained_count,
        parameter_bytes=sum(param.numel() * _dtype(param, cast).itemsize for _, param in params),
        gradient_bytes=nbytes,
        padding_bytes=layout.nbytes - nbytes,
        buffer_bytes=sum(buffer.numel() * _dtype(buffer, cast).itemsize for buffer in model.buffers()),
        workspace_bytes=_workspaces(how.device),
        in_group=max((sum(param.numel() for param in group) for group in grouped), default=0),
        largest=max((param.numel() for _, param in trained), default=0),
        last_bucket_bytes=layout.buckets[-1].nbytes if layout.buckets else 0,
        bucket_bytes=max((bucket.nbytes for bucket in layout.buckets), default=0),
        turns_bytes=sum(max((one.nbytes for one in layout.buckets[turn::2]), default=0) for turn in range(2)),
        root=in_units[-1],
        unit=max(in_units[:-1], default=0),
        owned=lambda ranks: _most_owned(metas, ranks),
        heap_share=in_heap / trained_count if trained_count else 1.0,
    )


def _most_owned(metas: Sequence[ParamMeta], ranks: int) -> int:
    ownership = cut_parameters(metas, ranks)
    return max(ownership.elements(rank) for rank in range(ranks))


def _workspaces(device: str) -> int:
    """Bytes of cuBLAS for forward's thread and for backward's. Devices before Hopper get smaller workspaces."""
    nbytes = CUBLAS_BYTES if device == "cuda" else 0
    if nbytes and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        nbytes //= 4
    return nbytes


def _dtype(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.dtype:
    return cast if cast is not None and tensor.is_floating_point() else tensor.dtype


def _dtype_name(param: torch.Tensor) -> str:
    names = {torch.float32: "float32", torch.bfloat16: "bf16-pure"}
    if param.dtype not in names:
        raise PlanError(f"the parameters are {param.dtype}: expected torch.float32 or torch.bfloat16, else pass dtype=")
    return names[param.dtype]


def _optimizer(
    optimizer: str | torch.optim.Optimizer, foreach: bool | None, fused: bool | None
) -> tuple[str, str, list[list[torch.Tensor]]]:
    """The optimizer's name, how it updates, and its groups of parameters if it is at hand."""
    name, groups = str(optimizer), []
    if isinstance(optimizer, torch.optim.Optimizer):
        settings = optimizer.defaults
        momentum = "-momentum" if isinstance(optimizer, torch.optim.SGD) and settings.get("momentum") else ""
        name = type(optimizer).__name__.lower() + momentum
        foreach = settings.get("foreach") if foreach is None else foreach
        fused = settings.get("fused") if fused is None else fused
        groups = [list(group["params"]) for group in optimizer.param_groups]
    if foreach and fused:
        raise PlanError("foreach=True and fused=True: expected one of them at most")
    if foreach is None and fused is None:
        return name, "auto", groups
    return name, "fused" if fused else "foreach" if foreach else "loop", groups


def _shapes(batch: Any) -> list[str]:
    """Of the batch's tensors, each shape once."""
    found = [" × ".join(map(str, item.shape)) for item in tree_leaves(batch) if isinstance(item, torch.Tensor)]
    return list(dict.fromkeys(shape for shape in found if shape))
