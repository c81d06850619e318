"""`paceline replay FILE`: runs the step of a failure capsule again, rank by rank, and shows what went wrong."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.agree.capsule import Capsule, read_capsule
from paceline.agree.drift import ranks_text
from paceline.bench.tables import NOTHING, Table, render
from paceline.errors import CapsuleDamaged, UsageError
from paceline.kernels import use_kernel_settings
from paceline.replica.rerun import (
    Losses,
    Rerun,
    RerunModel,
    call_arguments,
    captured_forwards,
    load_state,
    loss_of_user,
    mean_of_outputs,
    run_again,
    was_reproduced,
)

REPRODUCED, NOT_REPRODUCED, UNUSABLE = 0, 1, 2
LAST = 5


def main(file: Path, model: str | None = None, loss: str | None = None, device: str | None = None) -> int:
    """Replay one capsule. Exit status 0 if the failure was reproduced, 1 if not, 2 if the capsule cannot be run."""
    try:
        capsule = read_capsule(file)
        where = _device(capsule, device)
        then = {name: str(value) for name, value in capsule.settings.get("kernels", {}).items()}
        different = use_kernel_settings(then, where)
        subject = _model(capsule, model, loss, where)
        _say(*about(capsule), *(f"different from the failed run: {text} here" for text in different))
        seen = [run_again(subject, capsule, forward) for forward in captured_forwards(capsule)]
        if not seen:
            omitted = f" ({'; '.join(capsule.omitted)})" if capsule.omitted else ""
            raise UsageError(f"the capsule has no batch{omitted}, so there is nothing to run")
    except OSError as error:
        return _refuse(f"{file} cannot be read: {error.strerror}")
    except (UsageError, CapsuleDamaged) as error:
        return _refuse(str(error))
    _say("", render(table(seen)), "")
    reproduced, lines = was_reproduced(capsule, seen, subject)
    _say(*lines)
    return UNUSABLE if reproduced is None else REPRODUCED if reproduced else NOT_REPRODUCED


def about(capsule: Capsule) -> list[str]:
    """What the capsule says about itself."""
    ranks = ranks_text(capsule.ranks) if capsule.ranks else "unknown ranks"
    lanes = f", lanes {capsule.lanes[0]} to {capsule.lanes[-1]}" if capsule.lanes else ""
    lines = [
        f"{capsule.kind} in step {capsule.step}, at fault: {ranks} of {capsule.world_size}",
        f"  {capsule.error}",
        f"  with the state of rank {capsule.rank}{lanes}; {1 + len(capsule.others)} of {capsule.world_size} batches",
    ]
    if capsule.omitted:
        lines.append(f"  omitted or changed: {'; '.join(capsule.omitted)}")
    if capsule.collectives:
        lines.append(f"  its last collectives: {'; '.join(capsule.collectives[-LAST:])}")
    return lines


def table(seen: Sequence[Rerun]) -> Table:
    rows = []
    for one in seen:
        finite = NOTHING if one.error else "NO" if one.bad else "yes"
        numbers = [NOTHING if number is None else f"{number:.6g}" for number in (one.loss, one.norm)]
        where = str(one.forward.lane) if one.forward.lane is not None else one.forward.where or NOTHING
        rows.append([str(one.forward.rank), where, numbers[0], finite, numbers[1], one.error or one.bad or NOTHING])
    header = ("rank", "lane", "loss", "finite", "gradient norm", "first bad tensor")
    return Table("run again, one after another", header, rows)


# ---- what is run


def _device(capsule: Capsule, asked: str | None) -> torch.device:
    if asked is not None and asked.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device {asked}: expected cpu or cuda")
    if asked is not None and asked.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {asked}: torch sees no CUDA device here")
    had_gpu = "gpu" in capsule.settings.get("kernels", {})
    return torch.device(asked or ("cuda" if had_gpu and torch.cuda.is_available() else "cpu"))


def _model(capsule: Capsule, name: str | None, loss: str | None, device: torch.device) -> RerunModel:
    """Build what the capsule's step ran: the trainer's model, or the user's."""
    known = capsule.settings.get("train")
    losses: Losses = mean_of_outputs
    if name is not None:
        model = _built(name)
    elif isinstance(known, Mapping):
        model, losses = _trainers(known, capsule.state)
    else:
        raise UsageError(
            "the capsule does not say how its model is built: expected --model module:function, which returns it, "
            "and for a loss of your own --loss module:function, which is called with the model and a microbatch"
        )
    if loss is not None:
        losses = partial(loss_of_user, _find(loss))
    load_state(model, capsule.state, name or "the trainer")
    return RerunModel(model.to(device), losses, device)


def _built(name: str) -> nn.Module:
    build = _find(name)
    try:
        model = build()
    except Exception as error:
        raise UsageError(f"--model {name}: the function raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: expected a function that returns a module, got {type(model).__name__}")
    return model


def _find(name: str) -> Callable[..., Any]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UsageError(f"{name!r}: expected module:function")
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise UsageError(f"{name!r}: expected a function, got {type(found).__name__}")
    return found


def _trainers(settings: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> tuple[nn.Module, Losses]:
    from paceline.train.config import TrainConfig, build
    from paceline.train.model import GPT

    names = {item.name for item in fields(TrainConfig)}
    config = build({name: value for name, value in settings.items() if name in names})
    if "tokens.weight" not in state:
        raise UsageError("the capsule has no state of the trainer's model: expected a tensor tokens.weight")
    vocabulary = state["tokens.weight"].shape[0]
    model = GPT(config.shape, vocabulary, dropout=config.dropout, checkpointing=config.checkpointing)

    def losses(model: nn.Module, microbatch: Any) -> Iterator[torch.Tensor]:
        samples = [call_arguments(microbatch)[0]] if isinstance(microbatch, Mapping) else list(microbatch)
        for tokens, targets in samples:
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = model(tokens, targets)
            yield loss / len(samples)

    return model, losses


def _refuse(text: str) -> int:
    sys.stderr.write(f"paceline replay: {text}\n")
    return UNUSABLE


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
