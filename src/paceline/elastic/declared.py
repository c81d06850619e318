"""What a script has declared: everything that changes from step to step, by the names that the script gave it."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from paceline.checkpoint.compare import digests_of
from paceline.data.loader import Loader
from paceline.elastic.split_state import SplitState, put_together, replica_in, shards_in, split
from paceline.errors import UsageError
from paceline.replica.membership import take_up_cut
from paceline.stored.json_tree import Encoder


class Cut(NamedTuple):
    """The number of shards of a state, and the one that a rank holds."""

    shards: int
    shard: int


WHOLE = Cut(1, 0)


class Declared:
    """Models, optimizers and everything else that has a state or depends on the world."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        """Names and objects; None is left out."""
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
        self.replicas = [found for module in self.modules if (found := replica_in(module)) is not None]
        self.in_shards = [replica for replica in self.replicas if replica._placement.shards_optimizer]
        self._check_schedulers()

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next((param.device for module in self.modules for param in module.parameters()), torch.device("cpu"))

    def signature(self) -> int:
        """A number of 63 bits that is equal on ranks that have declared objects of the same names and types."""
        shards = [[shard.name for shard in shards_in(thing).values()] for thing in self.things.values()]
        text = json.dumps([[(name, type(thing).__name__) for name, thing in self.things.items()], shards])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    def state(self) -> dict[str, SplitState]:
        """The states of all declared objects, without copying tensors and without communication."""
        return {name: split(thing) for name, thing in self.stateful.items()}

    def take(self, state: Mapping[str, SplitState]) -> None:
        """Continue from this state, whose parts are those that this rank will own."""
        for name, thing in self.stateful.items():
            if name in state:
                put_together(thing, state[name])

    # ---- shards, which are all cut alike

    @property
    def held(self) -> Cut:
        """The current number of shards, and the one that this rank holds."""
        return Cut(*_owned(self.in_shards[0]).held) if self.in_shards else WHOLE

    @property
    def due(self) -> Cut:
        """The same, as it should be in the replicas' current group."""
        return Cut(*_owned(self.in_shards[0]).due) if self.in_shards else WHOLE

    @property
    def lacking(self) -> bool:
        """Whether parameters lack updates of ranks that were lost before all ranks had received them."""
        return any(_owned(replica).lacking for replica in self.in_shards)

    @property
    def multiple(self) -> int:
        """The number of ranks has to be a multiple of this."""
        return max((replica._shard or replica._copies or 1 for replica in self.in_shards), default=1)

    @property
    def divides(self) -> int:
        """The number of ranks has to divide this; 0: it need not divide anything."""
        counts = [replica._lane_count or 0 for replica in self.in_shards if replica._placement.shards_parameters]
        return math.gcd(*counts)

    def sources_of_due(self, shards: int) -> set[int]:
        """The shards, of a state cut into `shards`, that overlap with what this rank will own."""
        return set[int]().union(*(_owned(replica).sources_of_due(shards) for replica in self.in_shards))

    def take_up_cut(self) -> None:
        """Move the replicas to the parts that this rank will own from now on."""
        for replica in self.in_shards:
            take_up_cut(replica)

    def whole_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are whole on all ranks, although each rank updates only its own blocks."""
        replicas = [replica for replica in self.in_shards if not replica._placement.shards_parameters]
        return [(shard.name, shard.param.detach()) for replica in replicas for shard in _owned(replica).shards]

    def await_parameters(self) -> None:
        """Wait for the parameters that other ranks have updated."""
        for replica in self.in_shards:
            _owned(replica).follow_parameters()

    def complete_parameters(self) -> None:
        """Gather what all ranks own into the whole parameters. All ranks call it."""
        for replica in self.in_shards:
            _owned(replica).complete()

    def go_back(self) -> None:
        """An attempt has failed: drop gradients, and read its batches again."""
        for module in self.modules:
            for param in module.parameters():
                param.grad = None
        for thing in self.things.values():
            if hasattr(thing, "go_back"):
                thing.go_back()
            elif isinstance(thing, torch.amp.GradScaler):
                # unscale_()'s record of the dropped gradients, which load_state_dict() does not reset.
                thing._per_optimizer_states.clear()

    def begin_step(self, step: int | None) -> None:
        """Batches read from now on belong to this step; None: to no step."""
        for thing in self.things.values():
            if isinstance(thing, Loader):
                thing.begin_step(step)

    def commit(self, step: int) -> None:
        """Count what was read as trained on."""
        for thing in self.things.values():
            if isinstance(thing, Loader):
                thing.commit(step)

    def check_replicas(self, lanes_at_least: int) -> None:
        """Check what an elastic job requires of its models."""
        if not self.replicas:
            raise UsageError(
                "paceline.Elastic was given no paceline.DistributedDataParallel: in an elastic job it connects the "
                "ranks; wrap the model, and pass it as model="
            )
        for replica in self.replicas:
            if replica._placement.shards_optimizer and not replica._in_generations:
                raise UsageError(
                    f"placement={replica._placement.name!r} with a transport or a process_group of its own could not "
                    f"follow the generations of an elastic job: leave transport= and process_group= out"
                )
            if replica._lane_count is not None and replica._lane_count < lanes_at_least:
                raise UsageError(
                    f"lanes={replica._lane_count}, but this job may grow to {lanes_at_least} ranks, and each needs "
                    f"one: expected at least {lanes_at_least} lanes, or start it with a smaller maximum in --ranks"
                )
        cuts = {f"shard={replica._shard}, copies={replica._copies}" for replica in self.in_shards}
        if len(cuts) > 1:
            raise UsageError(
                f"replicas with {' and with '.join(sorted(cuts))} were declared: the sets of ranks that hold the state "
                f"would differ between them; give all the same shard= and copies="
            )

    def _check_schedulers(self) -> None:
        scheduled = {id(getattr(thing, "optimizer", None)) for thing in self.things.values()}
        for name, thing in self.things.items():
            wrapped = isinstance(thing, Optimizer) and getattr(thing.step, "_wrapped_by_lr_sched", False)
            if wrapped and id(thing) not in scheduled:
                raise UsageError(
                    f"{name}= has a learning rate scheduler that was not declared, so a rank that takes over the state "
                    f"of another would continue with another learning rate: pass it too, as scheduler="
                )


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _owned(replica: Any) -> Any:
    return replica._owned


def digest_of(name: str, state: Any) -> int:
    """A 63-bit digest that is equal on two ranks when their states are bit-identical."""
    encoder = Encoder()
    tree = json.dumps(encoder.encode(state, (name,)), sort_keys=True)
    found = hashlib.blake2b(tree.encode(), digest_size=8)
    for tensor_name, digest in zip(encoder.tensors, digests_of(list(encoder.tensors.values())), strict=True):
        found.update(f"{tensor_name} {digest}\n".encode())
    return int.from_bytes(found.digest()) >> 1
