"""What a script has declared: all that changes from step to step, by the names that the script gave it."""

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
    """Into how many shards a state is cut, and which of them a rank has."""

    shards: int
    shard: int


WHOLE = Cut(1, 0)


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
        self.replicas = [found for module in self.modules if (found := replica_in(module)) is not None]
        self.in_shards = [replica for replica in self.replicas if replica._placement.shards_optimizer]
        self._check_schedulers()

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next((param.device for module in self.modules for param in module.parameters()), torch.device("cpu"))

    def signature(self) -> int:
        """A number of 63 bits that is equal on ranks that have declared things of the same names and kinds."""
        shards = [[shard.name for shard in shards_in(thing).values()] for thing in self.things.values()]
        text = json.dumps([[(name, type(thing).__name__) for name, thing in self.things.items()], shards])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    def state(self) -> dict[str, SplitState]:
        """The state of all that has one: the tensors are those of the run. No other rank is asked for anything."""
        return {name: split(thing) for name, thing in self.stateful.items()}

    def take(self, state: Mapping[str, SplitState]) -> None:
        """Go on from this state, whose parts are what this rank is to own."""
        for name, thing in self.stateful.items():
            if name in state:
                put_together(thing, state[name])

    # ---- what is in shards, of which there is one cut

    @property
    def held(self) -> Cut:
        """Into how many shards the state is cut, and which of them this rank has."""
        return Cut(*_owned(self.in_shards[0]).held) if self.in_shards else WHOLE

    @property
    def due(self) -> Cut:
        """The same, as it is to be in the group that replicas have now."""
        return Cut(*_owned(self.in_shards[0]).due) if self.in_shards else WHOLE

    @property
    def lacking(self) -> bool:
        """Whether parameters lack what ranks have made of them that were lost before all had it."""
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
        """Which shards of a state that is cut into so many have something of what this rank is to have."""
        return set[int]().union(*(_owned(replica).sources_of_due(shards) for replica in self.in_shards))

    def take_up_cut(self) -> None:
        """Have the parts of replicas for what this rank is to have from now on."""
        for replica in self.in_shards:
            take_up_cut(replica)

    def whole_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """What of parameters all ranks have, though each updates its own blocks alone."""
        replicas = [replica for replica in self.in_shards if not replica._placement.shards_parameters]
        return [(shard.name, shard.param.detach()) for replica in replicas for shard in _owned(replica).shards]

    def await_parameters(self) -> None:
        """Have the parameters that others have updated, if they are still on their way."""
        for replica in self.in_shards:
            _owned(replica).follow_parameters()

    def complete_parameters(self) -> None:
        """Have what all ranks own in the parameters, where these are whole. All ranks call it."""
        for replica in self.in_shards:
            _owned(replica).complete()

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
                f"replicas with {' and with '.join(sorted(cuts))} were declared: which ranks have the state between "
                f"them would differ from one to the other; give all the same shard= and copies="
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


def _owned(replica: Any) -> Any:
    return replica._owned


def digest_of(name: str, state: Any) -> int:
    """A number of 63 bits that is equal on two ranks exactly when these states of theirs are, in bits."""
    encoder = Encoder()
    tree = json.dumps(encoder.encode(state, (name,)), sort_keys=True)
    found = hashlib.blake2b(tree.encode(), digest_size=8)
    for tensor_name, digest in zip(encoder.tensors, digests_of(list(encoder.tensors.values())), strict=True):
        found.update(f"{tensor_name} {digest}\n".encode())
    return int.from_bytes(found.digest()) >> 1
