"""One step of a failure capsule, run again in this process: what it is built from, and what is seen on the way."""

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.agree.capsule import Capsule
from paceline.agree.finite import first_not_finite
from paceline.errors import UsageError
from paceline.randomness import mixed, put_back, seed_all, set_rng_state
from paceline.replica.outputs import tensors_in

Losses = Callable[[nn.Module, Any], Iterable[torch.Tensor]]  # of one micro; each has its own backward


@dataclass(frozen=True)
class Turn:
    """One forward and backward of the step: a lane, or where there are none a rank."""

    rank: int
    lane: int | None
    micro: Any
    rng: Mapping[str, Any] | None
    number: int | None = None  # of several forwards of a rank without lanes


@dataclass
class Seen:
    """What came of a turn."""

    turn: Turn
    loss: float | None = None
    norm: float | None = None
    bad: str = ""  # the first thing that was not finite
    error: str = ""
    in_backward: bool = False  # was the error raised there?
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def turns(capsule: Capsule) -> list[Turn]:
    """All that the capsule holds of the step, in the order of ranks and lanes."""
    own = {"rank": capsule.rank, "lanes": capsule.lanes, "batch": capsule.batch, "rng": capsule.rng}
    found = []
    for part in sorted((own, *capsule.others), key=lambda part: int(part["rank"])):
        rank, lanes, batch = part["rank"], part["lanes"], part["batch"]
        if not lanes and isinstance(batch, list):
            several = len(batch) > 1
            for number, one in enumerate(batch):
                called = {"args": one["args"], "kwargs": one["kwargs"]}
                found.append(Turn(rank, None, called, one["rng"], number if several else None))
        elif not lanes:
            found.append(Turn(rank, None, batch, part["rng"]))
        elif isinstance(batch, list | tuple) and len(batch) == len(lanes):
            found += [Turn(rank, lane, micro, None) for lane, micro in zip(lanes, batch, strict=True)]
        else:
            raise UsageError(f"the capsule names lanes {list(lanes)} of rank {rank}, but has not one micro for each")
    return [turn for turn in found if turn.micro is not None]


# ---- what is run


@dataclass(frozen=True)
class Subject:
    """A model with the capsule's state, and how its losses are made."""

    model: nn.Module
    losses: Losses
    device: torch.device


def subject_of(capsule: Capsule, model: str | None, loss: str | None, device: torch.device) -> Subject:
    """Build what the capsule's step ran: the trainer's model, or the user's."""
    known = capsule.settings.get("train")
    if model is None and not isinstance(known, Mapping):
        raise UsageError(
            "the capsule does not say how its model is built: expected --model module:function, which returns it, "
            "and for a loss of your own --loss module:function, which is called with the model and a micro"
        )
    if model is None:
        assert isinstance(known, Mapping), "else it was refused"
        made, losses = _trainers(known, capsule.state)
    else:
        made, losses = _made(model), _default_losses
        if not isinstance(made, nn.Module):
            raise UsageError(f"--model {model}: expected a function that returns a module, got {type(made).__name__}")
    if loss is not None:
        losses = partial(_users_losses, _find(loss))
    _load(made, capsule.state, model or "the trainer")
    return Subject(made.to(device), losses, device)


def _made(name: str) -> Any:
    build = _find(name)
    try:
        return build()
    except Exception as error:
        raise UsageError(f"--model {name}: the function raised {type(error).__name__}: {error}") from error


def _find(name: str) -> Callable[..., Any]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UsageError(f"{name!r}: expected module:function")
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise UsageError(f"{name!r}: expected a function, got {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def _load(model: nn.Module, state: Mapping[str, torch.Tensor], name: str) -> None:
    try:
        missing, unexpected = model.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise UsageError(f"the model of {name} is not the one of the capsule: {error}") from error
    missing = [key for key in missing if not key.endswith("_extra_state")]  # a capsule holds tensors only
    if missing or unexpected:
        raise UsageError(
            f"the model of {name} is not the one of the capsule: it has {', '.join(missing) or 'nothing'} that the "
            f"capsule has not, and lacks {', '.join(unexpected) or 'nothing'} of it"
        )


def _trainers(settings: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> tuple[nn.Module, Losses]:
    from paceline.train.config import TrainConfig, build
    from paceline.train.model import GPT

    names = {item.name for item in fields(TrainConfig)}
    config = build({name: value for name, value in settings.items() if name in names})
    if "tokens.weight" not in state:
        raise UsageError("the capsule has no state of the trainer's model: expected a tensor tokens.weight")
    vocabulary = state["tokens.weight"].shape[0]
    model = GPT(config.shape, vocabulary, dropout=config.dropout, checkpointing=config.checkpointing)

    def losses(model: nn.Module, micro: Any) -> Iterator[torch.Tensor]:
        samples = [_args(micro)[0]] if isinstance(micro, Mapping) else list(micro)
        for tokens, targets in samples:
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = model(tokens, targets)
            yield loss / len(samples)

    return model, losses


def _args(micro: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a micro: as forward was, if that is what the capsule keeps, or by its parts."""
    if isinstance(micro, Mapping) and micro.keys() == {"args", "kwargs"}:
        return tuple(micro["args"]), dict(micro["kwargs"])
    if isinstance(micro, Mapping):
        return (), dict(micro)
    return (tuple(micro) if isinstance(micro, list | tuple) else (micro,)), {}


def _default_losses(model: nn.Module, micro: Any) -> Iterator[torch.Tensor]:
    args, kwargs = _args(micro)
    output = model(*args, **kwargs)
    floats = [tensor for tensor in tensors_in(output) if tensor.dtype.is_floating_point and tensor.requires_grad]
    if not floats:
        raise UsageError("the model returns nothing that has a gradient: expected --loss module:function")
    yield sum((tensor.float().mean() for tensor in floats), torch.zeros((), device=floats[0].device))


def _users_losses(function: Callable[..., Any], model: nn.Module, micro: Any) -> Iterator[torch.Tensor]:
    plain = isinstance(micro, Mapping) and micro.keys() == {"args", "kwargs"} and not micro["kwargs"]
    found = function(model, micro["args"] if plain else micro)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UsageError(f"--loss: expected a tensor with one number, got {type(found).__name__}")
    yield found


# ---- running it


def run_turn(subject: Subject, capsule: Capsule, turn: Turn) -> Seen:
    """Forward and backward of one turn, from the capsule's state and with its random numbers."""
    model, device, seen = subject.model, subject.device, Seen(turn)
    _load(model, capsule.state, "the capsule")  # buffers may have changed in the turn before
    model.train().zero_grad(set_to_none=True)
    micro = _moved(turn.micro, device)
    watch = _Watch(seen)
    watch.look("input", tensors_in(micro))
    for name, tensor in capsule.state.items():
        watch.look(f"{name}, before the step", [tensor])
    with put_back(device), watch.hooked(model):
        if turn.lane is not None and capsule.seed is not None:
            seed_all(mixed(capsule.seed, capsule.step, turn.lane), device)
        elif turn.rng is not None:
            set_rng_state(dict(turn.rng), device)
        try:
            seen.loss = 0.0
            for loss in subject.losses(model, micro):
                watch.look("the loss", [loss])
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


class _Watch:
    """Names the first thing that is not finite."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def look(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        if self._seen.bad:
            return
        found = first_not_finite((what, tensor.detach()) for tensor in tensors)
        if found is not None:
            self._seen.bad = f"{what}: {found.how_many} × {found.kind}"

    def hooked(self, model: nn.Module) -> "_Hooks":
        hooks = [part.register_forward_hook(partial(self._output, name)) for name, part in model.named_modules()]
        hooks += [
            param.register_hook(partial(self._gradient, f"the gradient of {name}"))
            for name, param in model.named_parameters()
            if param.requires_grad
        ]
        return _Hooks(hooks)

    def _output(self, name: str, part: nn.Module, _: Any, output: Any) -> None:
        what = f"{name or 'the model'} ({type(part).__name__})"
        tensors = list(tensors_in(output))
        self.look(f"the output of {what}", tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, f"the gradient of the output of {what}"))

    def _gradient(self, what: str, grad: torch.Tensor) -> None:
        self.look(what, [grad])


class _Hooks(nullcontext[None]):
    """Hooks that are gone afterwards."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        super().__init__()
        self._hooks = hooks

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
