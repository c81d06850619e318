"""Reruns the step of a failure capsule in this process, and decides whether the failure was reproduced."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from paceline.agree.capsule import UNKNOWN_ERROR, Capsule
from paceline.agree.drift import groups_of, ranks_text
from paceline.agree.finite import first_not_finite
from paceline.agree.state_digest import readable, state_digest
from paceline.errors import UsageError
from paceline.randomness import mixed, put_back, seed_all, set_rng_state
from paceline.reducer.autograd import tensors_in

HINT = (
    ". If your loop calls the model differently, or has another loss: --loss module:function(model, microbatch), "
    "where microbatch is, in lanes, what model.lanes() yielded, and otherwise the tuple of forward's arguments"
)
AS_GIVEN = "; the capsule holds the microbatches as passed to your loop, without its changes to them"

Losses = Callable[[nn.Module, Any], Iterable[torch.Tensor]]  # of one microbatch; each has its own backward


@dataclass(frozen=True)
class CapturedForward:
    """One forward and backward of the step: of a lane or, without lanes, of a rank."""

    rank: int
    lane: int | None
    microbatch: Any
    rng: Mapping[str, Any] | None
    number: int | None = None  # of several forwards of a rank without lanes

    @property
    def where(self) -> str:
        """The lane or the microbatch, if there are several."""
        if self.lane is not None:
            return f"lane {self.lane}"
        return "" if self.number is None else f"microbatch {self.number}"

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.where}" if self.where else f"rank {self.rank}"


@dataclass(frozen=True)
class RerunModel:
    """A model with the state of the capsule, and how its losses are computed."""

    model: nn.Module
    losses: Losses
    device: torch.device


@dataclass
class Rerun:
    """The observations of a repeated forward and backward."""

    forward: CapturedForward
    loss: float | None = None
    norm: float | None = None
    bad: str = ""  # the first thing that was not finite
    error: str = ""
    in_backward: bool = False  # was the error raised there?
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def captured_forwards(capsule: Capsule) -> list[CapturedForward]:
    """All forwards of the step that the capsule holds, in the order of ranks and lanes."""
    own = {"rank": capsule.rank, "lanes": capsule.lanes, "batch": capsule.batch, "rng": capsule.rng}
    found = []
    for part in sorted((own, *capsule.others), key=lambda part: int(part["rank"])):
        rank, lanes, batch = part["rank"], part["lanes"], part["batch"]
        if not lanes and isinstance(batch, list):
            several = len(batch) > 1
            for number, one in enumerate(batch):
                called = {"args": one["args"], "kwargs": one["kwargs"]}
                found.append(CapturedForward(rank, None, called, one["rng"], number if several else None))
        elif not lanes:
            found.append(CapturedForward(rank, None, batch, part["rng"]))
        elif isinstance(batch, list | tuple) and len(batch) == len(lanes):
            found += [CapturedForward(rank, lane, one, None) for lane, one in zip(lanes, batch, strict=True)]
        else:
            raise UsageError(
                f"the capsule names lanes {list(lanes)} of rank {rank}, but does not have one microbatch for each"
            )
    return [forward for forward in found if forward.microbatch is not None]


# ---- how a model is called


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], name: str) -> None:
    """Load the capsule's state into the model that `name` has built."""
    try:
        missing, unexpected = model.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise UsageError(f"{name} does not match the model in the capsule: {error}") from error
    missing = [key for key in missing if not key.endswith("_extra_state")]  # a capsule holds tensors only
    if missing or unexpected:
        raise UsageError(
            f"{name} does not match the model in the capsule: only the model has "
            f"{', '.join(missing) or 'nothing'}, only the capsule has {', '.join(unexpected) or 'nothing'}"
        )


def call_arguments(microbatch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called: as forward was, if that is what the capsule holds, or with the parts of a microbatch."""
    if isinstance(microbatch, Mapping) and microbatch.keys() == {"args", "kwargs"}:
        return tuple(microbatch["args"]), dict(microbatch["kwargs"])
    if isinstance(microbatch, Mapping):
        return (), dict(microbatch)
    return (tuple(microbatch) if isinstance(microbatch, list | tuple) else (microbatch,)), {}


def mean_of_outputs(model: nn.Module, microbatch: Any) -> Iterator[torch.Tensor]:
    """The default loss, if none is known."""
    args, kwargs = call_arguments(microbatch)
    output = model(*args, **kwargs)
    floats = [tensor for tensor in tensors_in(output) if tensor.dtype.is_floating_point and tensor.requires_grad]
    if not floats:
        raise UsageError("the model returns nothing that has a gradient: expected --loss module:function")
    yield sum((tensor.float().mean() for tensor in floats), torch.zeros((), device=floats[0].device))


def loss_of_user(function: Callable[..., Any], model: nn.Module, microbatch: Any) -> Iterator[torch.Tensor]:
    plain = isinstance(microbatch, Mapping) and microbatch.keys() == {"args", "kwargs"} and not microbatch["kwargs"]
    found = function(model, microbatch["args"] if plain else microbatch)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UsageError(f"--loss: expected a tensor with one number, got {type(found).__name__}")
    yield found


# ---- running it


def run_again(subject: RerunModel, capsule: Capsule, forward: CapturedForward) -> Rerun:
    """Forward and backward of one microbatch, from the capsule's state and with its random numbers."""
    model, device, seen = subject.model, subject.device, Rerun(forward)
    load_state(model, capsule.state, "the capsule")  # buffers may have changed in the previous forward
    model.train().zero_grad(set_to_none=True)
    microbatch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), forward.microbatch)
    _look(seen, "input", tensors_in(microbatch))
    for name, tensor in capsule.state.items():
        _look(seen, f"{name}, before the step", [tensor])
    with put_back(device), _watched(model, seen):
        if forward.lane is not None and capsule.seed is not None:
            seed_all(mixed(capsule.seed, capsule.step, forward.lane), device)
        elif forward.rng is not None:
            set_rng_state(dict(forward.rng), device)
        try:
            seen.loss = 0.0
            for loss in subject.losses(model, microbatch):
                _look(seen, "the loss", [loss])
                seen.in_backward = True
                loss.backward()
                seen.in_backward = False
                seen.loss += float(loss.detach())
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever the model raises is what is looked for)
            seen.loss, seen.error = None, f"{type(error).__name__}: {error}"
    seen.grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    seen.norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in seen.grads.values()))
    return seen


def _look(seen: Rerun, what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Note the first thing that is not finite."""
    if not seen.bad and (found := first_not_finite((what, tensor.detach()) for tensor in tensors)) is not None:
        seen.bad = f"{what}: {found.how_many} × {found.kind}"


@contextmanager
def _watched(model: nn.Module, seen: Rerun) -> Iterator[None]:
    """Check the outputs of all modules, their gradients, and those of parameters."""

    def on_gradient(what: str, grad: torch.Tensor) -> None:
        _look(seen, what, [grad])

    def on_output(name: str, part: nn.Module, _: Any, output: Any) -> None:
        what = f"{name or 'the model'} ({type(part).__name__})"
        tensors = list(tensors_in(output))
        _look(seen, f"the output of {what}", tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(on_gradient, f"the gradient of the output of {what}"))

    hooks: list[Any] = [part.register_forward_hook(partial(on_output, name)) for name, part in model.named_modules()]
    hooks += [
        param.register_hook(partial(on_gradient, f"the gradient of {name}"))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---- was the failure reproduced?


def was_reproduced(capsule: Capsule, seen: Sequence[Rerun], subject: RerunModel) -> tuple[bool | None, list[str]]:
    """Whether the failure of the capsule happened again, and lines that say so. None: nothing could be run."""
    if all(one.error for one in seen) and not any(_is_that_crash(capsule, one) for one in seen):
        first = seen[0]
        return None, [f"inconclusive: no forward could be run; {first.forward} raises {first.error}{HINT}"]
    if capsule.kind == "crash":
        return _crashed_again(capsule, seen)
    if capsule.kind == "not-finite":
        return _not_finite_again(capsule, seen)
    return _differs_again(capsule, seen, subject)


def _is_that_crash(capsule: Capsule, one: Rerun) -> bool:
    if capsule.kind != "crash" or not one.error:
        return False
    if capsule.error == UNKNOWN_ERROR:
        return one.in_backward
    return one.error.partition(":")[0] == capsule.error.partition(":")[0]


def _crashed_again(capsule: Capsule, seen: Sequence[Rerun]) -> tuple[bool, list[str]]:
    for one in seen:
        if _is_that_crash(capsule, one):
            return True, [f"reproduced: {one.forward} raises {one.error}"]
    other = next((one for one in seen if one.error), None)
    what = f"{other.forward} raises something else: {other.error}" if other else "nothing was raised"
    return False, [f"not reproduced: {what}{AS_GIVEN if capsule.lanes else ''}"]


def _not_finite_again(capsule: Capsule, seen: Sequence[Rerun]) -> tuple[bool, list[str]]:
    bad = [one for one in seen if one.bad and not one.error]
    if bad:
        return True, [f"reproduced: {one.forward}: not finite, first in {one.bad}" for one in bad]
    total: dict[str, torch.Tensor] = {}
    for one in seen:
        for name, grad in one.grads.items():
            share = grad / len(seen)
            total[name] = total[name] + share if name in total else share
    found = first_not_finite(total.items())
    if found is not None:
        what = f"{found.name}, {found.how_many} × {found.kind}"
        return True, [f"reproduced: all gradients are finite, but their sum is not: {what}"]
    failed = next((one for one in seen if one.error), None)
    what = f"{failed.forward} raises {failed.error}{HINT}" if failed else "everything that was computed is finite"
    return False, [f"not reproduced: {what}{AS_GIVEN if capsule.lanes else ''}"]


def _differs_again(capsule: Capsule, seen: Sequence[Rerun], subject: RerunModel) -> tuple[bool, list[str]]:
    """Ranks held different state, whose digests are in the capsule. A step with varying results explains it."""
    again, lines = False, []
    for name, digests in dict(capsule.settings.get("words", {})).items():
        groups = groups_of(digests)
        if len(groups) == 1:
            continue
        held = capsule.state.get(name)
        same = held is None or (readable(held) and state_digest([held]) == digests[capsule.rank])
        again |= same
        held_by = "; ".join(f"{ranks_text(ranks)}: {digests[ranks[0]] & (1 << 64) - 1:016x}" for ranks in groups)
        lines.append(
            f"{name}: {held_by}" + ("" if same else f"; the capsule's own is not what rank {capsule.rank} had")
        )
    for one in seen:
        second = run_again(subject, capsule, one.forward).grads
        name = next((name for name, grad in one.grads.items() if _digest(grad) != _digest(second.get(name))), None)
        if name is not None:
            again = True
            lines.append(f"{one.forward} gives different bits when it is run again, first in the gradient of {name}")
    if again:
        return True, ["reproduced:", *(f"  {line}" for line in lines)]
    lines.append("every lane gives the same bits when it is run twice: this step does not make replicas drift")
    return False, ["not reproduced:", *(f"  {line}" for line in lines)]


def _digest(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else state_digest([tensor.to_dense()])
