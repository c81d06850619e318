"""The part of a saved optimizer state that a rank reads: all of it, or its shard if the optimizer is sharded."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.checkpoint.shards import kept_per_element, updated
from paceline.checkpoint.stored_tensor import StoredTensor, fill, stored_in
from paceline.errors import Malformed
from paceline.stored.tensor_part import TensorPart

MASTER = "master"  # the key under which an optimizer over shards keeps its float32 copy of a parameter


def check_optimizer_form(saved: Any) -> None:
    """Raise Malformed unless this is an optimizer state in torch's form: states by parameter, and groups."""
    state, groups = (saved.get("state"), saved.get("param_groups")) if isinstance(saved, dict) else (None, None)
    states = isinstance(state, dict) and all(isinstance(values, dict) for values in state.values())
    listed = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(place) in (int, str) for place in group["params"])
        for group in groups
    )
    if not (states and listed):
        raise Malformed("an optimizer's state has no state by parameter, or no groups of parameters")


def _of_params(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Any, torch.Tensor, Any, dict[str, Any]]]:
    """For each parameter of an optimizer: its index in a saved state, the tensor that is updated, its shard if it is
    one, and its saved state."""
    places = [place for group in saved.get("param_groups", ()) for place in group["params"]]
    for (param, shard), place in zip(updated(optimizer), places, strict=False):
        yield place, param, shard, saved["state"].get(place, {})


def _is_cut(optimizer: torch.optim.Optimizer, shard: Any, name: str, value: Any) -> bool:
    """Whether a rank needs only its part of a state of the whole parameter."""
    if shard is None or not isinstance(value, StoredTensor) or value.shape != shard.form.shape:
        return False
    return bool(value.shape) or name == MASTER or name in kept_per_element(optimizer)


def wanted_of(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[tuple[StoredTensor, int, int]]:
    for _, _, shard, values in _of_params(saved, optimizer):
        for name, value in values.items():
            if _is_cut(optimizer, shard, name, value):
                if name != MASTER or shard.has_master:
                    yield (value, *value.span_of(shard.form, shard.span))
            elif name != MASTER:
                yield from ((one, 0, one.shape.numel()) for one in stored_in(value))
    yield from ((one, 0, one.shape.numel()) for one in stored_in(saved.get("param_groups", ())))


def filled_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, read into its existing tensors, or into new ones on the device of its parameters."""
    state: dict[Any, Any] = dict(saved["state"])
    for place, param, shard, values in _of_params(saved, optimizer):
        known: dict[str, Any] = optimizer.state.get(param, {})
        found: dict[str, Any] = {}
        for name, value in values.items():
            if _is_cut(optimizer, shard, name, value):
                if name != MASTER or shard.has_master:
                    into = shard.value.detach() if name == MASTER else known.get(name)
                    found[name] = _read_part(value, into, shard)
            elif name == MASTER:
                continue  # saved by another run, and not needed here
            elif isinstance(value, StoredTensor) and value.shape == param.shape and name != "step":
                found[name] = value.load(known.get(name), param.device)
            else:
                found[name] = fill(value, known.get(name))
        if place in state:
            state[place] = found
    filled: dict[str, Any] = fill({**saved, "state": state})
    return filled


def _read_part(value: StoredTensor, into: torch.Tensor | None, shard: Any) -> TensorPart:
    begin, end = shard.span
    if into is None or into.shape != (end - begin,) or into.dtype is not value.dtype:
        into = torch.empty(end - begin, dtype=value.dtype, device=shard.value.device)
    value.read_part(into, begin, shard.form)
    return TensorPart(into, begin, shard.form)
