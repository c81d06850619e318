"""The shards of a model and an optimizer, without gathering them. Replicas and sharded optimizers are looked up
by name, because not every model and optimizer here is paceline's."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.errors import NotWhole
from paceline.stored.tensor_part import TensorPart


def sharded_parameters(model: nn.Module) -> Any:
    """The blocks of a replica whose parameters are in shards, or None."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        owned = inner.__dict__.get("_owned")
        if getattr(owned, "units", None) is not None:
            return owned
        inner = getattr(inner, "_orig_mod", None) or (inner is not bare(inner) and getattr(inner, "module", None))
    return None


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state_dict() of the bare model, with a TensorPart for each parameter that ranks hold in shards."""
    owned = sharded_parameters(model)
    if owned is None:
        return bare(model).state_dict()
    try:
        with owned.units.in_shards():
            state: dict[str, Any] = bare(model).state_dict(keep_vars=True)
    except NotWhole:  # the model computes its state from its parameters
        return bare(model).state_dict()
    for name, value in state.items():
        shard = owned.find(value) if isinstance(value, torch.Tensor) else None
        if shard is not None:
            state[name] = TensorPart(shard.block, shard.span[0], shard.form)
    return state


def optimizer_state(value: Any) -> Any:
    """The state_dict() of an optimizer or another object, with a TensorPart for everything that ranks hold in
    shards."""
    return value.state_in_shards() if hasattr(value, "state_in_shards") else value.state_dict()


def updated(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """The tensors that an optimizer updates, each with its shard, or None for a whole parameter."""
    if hasattr(optimizer, "_shards"):
        return list(optimizer._shards())
    return [(param, None) for group in optimizer.param_groups for param in group["params"]]


def kept_per_element(optimizer: torch.optim.Optimizer) -> Iterable[str]:
    """The states of a sharded optimizer that have one entry per element of a parameter."""
    return getattr(optimizer, "_per_element", frozenset())


def names_of_params(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> list[str] | None:
    """The model's names of the parameters that an optimizer updates, in its order. None if some are not the model's."""
    if model is None:
        return None
    owned = sharded_parameters(model)
    names: dict[int, str] = {}
    for name, param in bare(model).named_parameters():
        shard = owned.find(param) if owned is not None else None
        names[id(param if shard is None else shard.param)] = name
    found = [names.get(id(param if shard is None else shard.param)) for param, shard in updated(optimizer)]
    known = [name for name in found if name is not None]
    return known if len(known) == len(found) else None
