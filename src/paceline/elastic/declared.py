"""What a script has declared: all that changes from step to step, by the names that the script gave it."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from paceline.bare import bare
from paceline.checkpoint.compare import digests_of
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.replica.ddp import DistributedDataParallel
from paceline.stored.json_tree import Encoder


class Declared:
    """Models, optimizers and all else that has a state, or follows the world."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        """Names and what they stand for; what is None is left out."""
        self.things = {name: thing for name, thing in things.items() if thing is not None}
        for name, thing in self.things.items():
            if not (_has_state(thing) or hasattr(thing, "follow_group")):
                raise UsageError(
                    f"{name}= was given a {type(thing).__name__}, which has no state_dict() and load_state_dict(); "
                    f"declare what changes from step to step, and give plain values a class with these two"
                )
        values = list(self.things.values())
        self.stateful = {name: thing for name, thing in self.things.items() if _has_state(thing)}
        self.modules = [thing for thing in values if isinstance(thing, nn.Module)]
        self.optimizers = [thing for thing in values if isinstance(thing, Optimizer)]
        self.followers = [thing for thing in values if hasattr(thing, "follow_group")]
        self.replicas = [found for module in self.modules if (found := _replica_in(module)) is not None]
        self._check_schedulers()

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next((param.device for module in self.modules for param in module.parameters()), torch.device("cpu"))

    def signature(self) -> int:
        """A number of 63 bits that is equal on ranks that have declared things of the same names and kinds."""
        text = json.dumps([(name, type(thing).__name__) for name, thing in self.things.items()])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    def state(self) -> dict[str, Any]:
        """The state of all that has one: the tensors are those of the run."""
        return {name: _state_of(thing) for name, thing in self.stateful.items()}

    def digests(self) -> dict[str, int]:
        """For each name a number of 63 bits that is equal on two ranks exactly when their states are, in bits."""
        return {name: _digest(name, state) for name, state in self.state().items()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another rank, as `state()` has told it."""
        for name, thing in self.stateful.items():
            _load(thing, state[name])

    def go_back(self) -> None:
        """An attempt has failed: gradients are dropped, and what was read for it is read again."""
        for module in self.modules:
            for param in module.parameters():
                param.grad = None
        for thing in self.things.values():
            if hasattr(thing, "go_back"):
                thing.go_back()
            elif isinstance(thing, torch.amp.GradScaler):
                # What unscale_() has noted of gradients that are gone; load_state_dict() does not touch it.
                thing._per_optimizer_states.clear()

    def begin_step(self, step: int | None) -> None:
        """What is read from here on is for this step; None: for none."""
        for thing in self.things.values():
            if isinstance(thing, Loader):
                thing.begin_step(step)

    def commit(self, step: int) -> None:
        """What was read is counted as trained on."""
        for thing in self.things.values():
            if isinstance(thing, Loader):
                thing.commit(step)

    def check_replicas(self, lanes_at_least: int) -> None:
        """What an elastic job needs of its models."""
        if not self.replicas:
            raise UsageError(
                "paceline.Elastic was given no paceline.DistributedDataParallel: in an elastic job it is what joins "
                "ranks; wrap the model, and declare it by model="
            )
        for replica in self.replicas:
            if replica._placement.shards_optimizer:
                raise UsageError(
                    f"placement={replica._placement.name!r} keeps state on one rank alone, so the ranks that outlive "
                    f'it could not go on; use placement="ddp" in an elastic job, or start it with --ranks N'
                )
            if replica._lane_count is not None and replica._lane_count < lanes_at_least:
                raise UsageError(
                    f"lanes={replica._lane_count}, but this job may grow to {lanes_at_least} ranks, and each needs "
                    f"one: expected at least {lanes_at_least} lanes, or start it with a smaller maximum in --ranks"
                )

    def _check_schedulers(self) -> None:
        scheduled = {id(getattr(thing, "optimizer", None)) for thing in self.things.values()}
        for name, thing in self.things.items():
            wrapped = isinstance(thing, Optimizer) and getattr(thing.step, "_wrapped_by_lr_sched", False)
            if wrapped and id(thing) not in scheduled:
                raise UsageError(
                    f"{name}= has a learning rate scheduler that was not declared, so a rank that takes over the state "
                    f"of another would go on with another rate: pass it too, as scheduler="
                )


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _replica_in(module: nn.Module) -> DistributedDataParallel | None:
    inner = getattr(module, "_orig_mod", module)  # torch.compile's wrapper
    return inner if isinstance(inner, DistributedDataParallel) else None


def _state_of(thing: Any) -> Any:
    if not isinstance(thing, nn.Module):
        return thing.state_dict()
    module = bare(thing)
    state = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    return {"state": dict(state), "metadata": getattr(state, "_metadata", None), "buffers": buffers}


def _load(thing: Any, state: Any) -> None:
    if not isinstance(thing, nn.Module):
        thing.load_state_dict(state)
        return
    module = bare(thing)
    values = OrderedDict(state["state"])
    values._metadata = state["metadata"]  # type: ignore[attr-defined]
    module.load_state_dict(values)
    with torch.no_grad():
        for name, value in state["buffers"].items():
            module.get_buffer(name).detach().copy_(value)


def _digest(name: str, state: Any) -> int:
    encoder = Encoder()
    tree = json.dumps(encoder.encode(state, (name,)), sort_keys=True)
    found = hashlib.blake2b(tree.encode(), digest_size=8)
    for tensor_name, digest in zip(encoder.tensors, digests_of(list(encoder.tensors.values())), strict=True):
        found.update(f"{tensor_name} {digest}\n".encode())
    return int.from_bytes(found.digest()) >> 1
