"""The state of one declared object, split into what all ranks share and this rank's shards.

A part is identified by the number of a parameter, a key, and its first element in the parameter, so the number of ranks
that share the whole does not matter.
"""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.bare import bare
from paceline.errors import UsageError
from paceline.reducer.shard import Shard
from paceline.replica.ddp import DistributedDataParallel
from paceline.replica.owned import OwnedBlocks
from paceline.replica.sharded_optimizer import ShardedOptimizer
from paceline.stored.tensor_part import TensorPart

BLOCK = "block"  # the key of what a rank owns of a parameter itself

Parts = dict[int, dict[str, TensorPart]]


class SplitState(NamedTuple):
    """The tensors are those of the run."""

    rest: Any  # what all ranks share
    parts: Parts


def replica_in(module: nn.Module) -> DistributedDataParallel | None:
    """The replica that a module is, or that torch.compile has wrapped."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, DistributedDataParallel) else None


def owned_in(thing: Any) -> OwnedBlocks | None:
    """This rank's blocks of the parameters of a replica or an optimizer, if they are sharded."""
    owned = None
    if isinstance(thing, nn.Module):
        replica = replica_in(thing)
        owned = None if replica is None else replica._owned
    elif isinstance(thing, ShardedOptimizer):
        owned = thing._owned
    return owned if owned is not None and owned.cut else None


def shards_in(thing: Any) -> Mapping[int, Shard]:
    """The shards that the parts of an object belong to, by number."""
    if isinstance(thing, ShardedOptimizer):
        return {index: shard for index, (_, shard) in enumerate(thing._shards()) if shard is not None}
    owned = owned_in(thing)
    return {} if owned is None else dict(enumerate(owned.shards))


def split(thing: Any) -> SplitState:
    """Split the state of an object, without communication."""
    if isinstance(thing, ShardedOptimizer):
        return SplitState(*thing.split_state())
    if not isinstance(thing, nn.Module):
        return SplitState(thing.state_dict(), {})
    owned, module = owned_in(thing), bare(thing)
    with _left_in_shards(owned):
        state = module.state_dict(keep_vars=owned is not None)
    whole = {name: value for name, value in state.items() if not _is_in_shards(value, owned)}
    plain = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    rest = {"state": plain, "metadata": getattr(state, "_metadata", None), "buffers": buffers}
    parts = {
        index: {BLOCK: TensorPart(shard.block, shard.span[0], shard.form)} for index, shard in shards_in(thing).items()
    }
    return SplitState(rest, parts)


def put_together(thing: Any, state: SplitState) -> None:
    """Load this state into an object; its parts are what this rank owns."""
    if isinstance(thing, ShardedOptimizer):
        values: dict[int, dict[str, Any]] = {index: dict(kept) for index, kept in state.rest["state"].items()}
        for index, parts in state.parts.items():
            values[index] = {**values.get(index, {}), **parts}
        thing.load_state_dict({**state.rest, "state": values})
    elif not isinstance(thing, nn.Module):
        thing.load_state_dict(state.rest)
    else:
        _load(thing, state)


def _load(thing: nn.Module, state: SplitState) -> None:
    owned, module, rest = owned_in(thing), bare(thing), state.rest
    values = OrderedDict(rest["state"])
    values._metadata = rest["metadata"]  # type: ignore[attr-defined]
    with _left_in_shards(owned):
        known = module.state_dict(keep_vars=True)
        told = module.load_state_dict(values, strict=owned is None)
    missing = [name for name in told.missing_keys if not _is_in_shards(known.get(name), owned)]
    if strange := [*missing, *told.unexpected_keys]:
        raise UsageError(
            f"the state of another rank does not fit the model's {strange[0]!r}; build it the same way on all"
        )
    with torch.no_grad():
        for name, value in rest["buffers"].items():
            module.get_buffer(name).detach().copy_(value)
        for index, parts in state.parts.items():
            shards_in(thing)[index].block.copy_(parts[BLOCK].values)
    if owned is not None:
        owned.lacking = owned.gathers is not None  # until the blocks of other ranks have arrived too


def _left_in_shards(owned: OwnedBlocks | None) -> Any:
    return nullcontext() if owned is None or owned.units is None else owned.units.in_shards()


def _is_in_shards(value: Any, owned: OwnedBlocks | None) -> bool:
    return owned is not None and isinstance(value, torch.Tensor) and owned.find(value) is not None
