"""The plan of a model that is at hand: states by closed form, activations by following it without memory."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.bare import bare
from paceline.layout import BucketCaps, ParamMeta, plan_layout
from paceline.memory_plan.assemble import (
    Course,
    CourseAt,
    Stock,
    rank_plans,
    state_lines,
    times,
    update_lines,
)
from paceline.memory_plan.closed_form import CUBLAS_BYTES, DEVICES, make_wish
from paceline.memory_plan.follow import Errand, Loss, follow, samples_of
from paceline.memory_plan.numbers import show_count
from paceline.memory_plan.states import PlanError, convention, optimizer_of, precision_of, update_way
from paceline.memory_plan.timeline import GRADIENTS, HEAP_BLOCK_BYTES, Height, Timeline, between, highest
from paceline.memory_plan.value import Line, MemoryPlan

CUDA_GRAIN = 512  # what CUDA's allocator rounds up to


def plan(
    model: nn.Module,
    batch: Any = None,
    *,
    optimizer: str | torch.optim.Optimizer = "adamw",
    dtype: str | None = None,
    ranks: int | Sequence[int] = 1,
    accumulate: int = 1,
    lanes: int | None = None,
    foreach: bool | None = None,
    fused: bool | None = None,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    device_bytes: int | None = None,
    link_gbit: float | None = None,
    backward_s: float | None = None,
) -> MemoryPlan:
    """Plan the memory of training `model` before it starts. The model is not touched, and may be on the meta device.

    Args:
        model: the module, wrapped or not. What it does about checkpointing and dropout is planned as it is.
        batch: one micro of one rank; a tensor, a tuple (model(*batch)) or a mapping (model(**batch)). Only shapes and
            dtypes matter. Without it the states alone are planned.
        optimizer: a name, or the optimizer itself.
        dtype: "float32", "bf16" (autocast), "bf16-master" or "bf16-pure"; by default what the parameters have.
        ranks: one size of the world, or several.
        accumulate: micros of one step.
        lanes: as DistributedDataParallel was told.
        foreach, fused: as the optimizer was told; by default torch's own choice.
        loss: where the model does not return its loss: loss(model(*batch[:-1]), batch[-1]).
        device: "cpu" or "cuda"; by default where the parameters are.
        device_bytes: memory of one device; then the plan tells whether it fits and the largest batch that does.
        link_gbit, backward_s: a rank's link and the time of its backward; then the plan tells what stays exposed.
    """
    model = bare(model)
    params = [(name, param) for name, param in model.named_parameters()]
    if not params:
        raise PlanError(f"model: expected a module with parameters, {type(model).__name__} has none")
    place = _device_of(device, params[0][1])
    word = dtype if dtype is not None else _dtype_word(params[0][1])
    precision, (name, way, group) = precision_of(word), _optimizer(optimizer, place, foreach, fused)
    wish = make_wish(ranks, accumulate, device_bytes, link_gbit, backward_s, lanes)
    cast = None if dtype is None else (torch.float32 if precision.parameter == 4 else torch.bfloat16)
    stock = _stock(model, params, place, word, name, way, group, cast)
    notes: list[str] = []
    if batch is None:
        notes.append("activations are not in it: plan(model, batch) follows the model")
        course_at: CourseAt = _no_course
    else:
        followed = place if place == "cpu" or torch.cuda.is_available() else "cpu"
        if followed != place:
            notes.append("there is no CUDA here, so kernels of the CPU were followed: CUDA's may keep a little more")
        errand = Errand(model, batch, loss, torch.device(followed), cast, precision.autocast)
        course_at = Courses(errand, CUDA_GRAIN if place == "cuda" else 1)
    plans = rank_plans(stock, course_at, wish)
    count = sum(param.numel() for _, param in params)
    size = None if batch is None else samples_of(batch)
    shown = "" if batch is None else f", batch {' and '.join(_shapes(batch))}"
    subject = f"{type(model).__name__}, {show_count(count)} parameters{shown}, {word}, {name} ({way}), {place}"
    return MemoryPlan(subject, convention(word, name), count, size, place, plans, wish.device_bytes, tuple(notes))


class Courses:
    """What comes and goes, by batch. Followed twice at most where sizes grow evenly with the batch."""

    def __init__(self, errand: Errand, grain: int) -> None:
        self._errand = errand
        self._grain = grain
        self._own = samples_of(errand.batch)
        self._timeline = functools.cache(functools.partial(follow, errand))
        self._nbytes = sum(item.nbytes for item in tree_leaves(errand.batch) if isinstance(item, torch.Tensor))

    def __call__(self, wanted: int | None) -> Course:
        size = self._own if wanted is None else wanted
        timeline = self._at(size)
        fresh, steady = (highest(timeline, taken_leave=leave, grain=self._grain) for leave in (False, True))
        inputs = Line("batch", self._nbytes * size // self._own, "what was given")
        return Course(((_when(fresh), fresh),), ((_when(steady), steady),), (), inputs)

    def _at(self, size: int) -> Timeline:
        own = self._timeline(self._own)
        if size == self._own:
            return own
        double = self._timeline(2 * self._own)
        if own.same_course(double):
            return between(own, self._own, double, 2 * self._own, size)
        return self._timeline(size)


def _when(height: Height) -> str:
    return "backward" if height.in_backward else "forward"


def _no_course(_: int | None) -> None:
    return None


def _stock(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter]],
    device: str,
    dtype: str,
    optimizer: str,
    way: str,
    group: Sequence[Sequence[torch.Tensor]] | None,
    cast: torch.dtype | None,
) -> Stock:
    precision, cost = precision_of(dtype), optimizer_of(optimizer)
    trained = [(name, param) for name, param in params if param.requires_grad]
    count = sum(param.numel() for _, param in trained)
    metas = [ParamMeta(name, tuple(p.shape), p.stride(), _dtype(p, cast), torch.device("meta")) for name, p in trained]
    layout = plan_layout(metas, range(len(metas) - 1, -1, -1), BucketCaps.from_mib(None, None))
    nbytes = sum(meta.nbytes for meta in metas)
    whole = sum(param.numel() * _dtype(param, cast).itemsize for _, param in params)
    buffers = sum(buffer.numel() * _dtype(buffer, cast).itemsize for buffer in model.buffers())
    always = (
        Line("parameters", whole, _sum(precision.parameter, sum(param.numel() for _, param in params), whole)),
        Line("master", precision.master * count, times(precision.master, count)),
        *state_lines(cost.states, precision.state, count),
        Line("buffers", buffers, "of the model"),
        _workspaces(device),
    )
    groups = group or [[param for _, param in trained]]
    in_group = max((sum(param.numel() for param in item) for item in groups), default=0)
    largest = max((param.numel() for _, param in trained), default=0)
    update = update_lines(way, dtype, optimizer, in_group, largest, count)
    in_heap = sum(meta.numel for meta in metas if meta.nbytes < HEAP_BLOCK_BYTES)
    return Stock(
        always,
        Line(GRADIENTS, nbytes, _sum(precision.gradient, count, nbytes)),
        Line("gradient buckets", layout.nbytes - nbytes, "padding; gradients are views of their buckets"),
        update,
        layout.buckets[-1].nbytes if layout.buckets else 0,
        device,
        in_heap / count if count else 1.0,
    )


def _workspaces(device: str) -> Line:
    """Of forward's thread and of backward's. Devices before Hopper get smaller ones."""
    nbytes = CUBLAS_BYTES if device == "cuda" else 0
    if nbytes and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        nbytes //= 4
    return Line("cuBLAS workspaces", nbytes, "one for forward, one for backward")


def _sum(size: int, count: int, nbytes: int) -> str:
    return times(size, count) if size * count == nbytes else f"{count:,} elements of several dtypes"


def _dtype(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.dtype:
    return cast if cast is not None and tensor.is_floating_point() else tensor.dtype


def _dtype_word(param: torch.Tensor) -> str:
    words = {torch.float32: "float32", torch.bfloat16: "bf16-pure"}
    if param.dtype not in words:
        raise PlanError(f"the parameters are {param.dtype}: expected torch.float32 or torch.bfloat16, or dtype= given")
    return words[param.dtype]


def _device_of(device: str | torch.device | None, param: torch.Tensor) -> str:
    if device is None:
        return "cuda" if param.device.type == "cuda" else "cpu"
    kind = str(device).split(":")[0]
    if kind not in DEVICES:
        raise PlanError(f"device={str(device)!r}: expected one of {', '.join(DEVICES)}")
    return kind


def _optimizer(
    optimizer: str | torch.optim.Optimizer, device: str, foreach: bool | None, fused: bool | None
) -> tuple[str, str, list[list[torch.Tensor]] | None]:
    """Its name, how it updates, and its groups where it is at hand."""
    if isinstance(optimizer, str):
        return optimizer, update_way(optimizer, device, foreach, fused), None
    name = type(optimizer).__name__.lower()
    settings = optimizer.defaults
    if name == "sgd" and settings.get("momentum"):
        name = "sgd-momentum"
    foreach = settings.get("foreach") if foreach is None else foreach
    fused = settings.get("fused") if fused is None else fused
    groups = [list(group["params"]) for group in optimizer.param_groups]
    return name, update_way(name, device, foreach, fused), groups


def _shapes(batch: Any) -> list[str]:
    """Of the batch's tensors, each shape once."""
    found = [" × ".join(map(str, item.shape)) for item in tree_leaves(batch) if isinstance(item, torch.Tensor)]
    return list(dict.fromkeys(shape for shape in found if shape))
