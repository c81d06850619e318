"""One gather of updated parameters: in progress, awaited by users of a parameter, complete, or failed."""

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum, auto

import torch
from torch import nn

from paceline.collectives.block_gather import BlockGather
from paceline.collectives.group import Group
from paceline.errors import IllegalMove
from paceline.reducer.shard import Shard
from paceline.replica.pending_parameter import pending_class
from paceline.strategies.multi_step import QueuedWork, SideStream, Steps
from paceline.trace import Moment


class GatherState(Enum):
    """The life of one gather, from update to update."""

    DONE = auto()  # the parameters have their values
    STARTED = auto()  # they may be in the middle of being written
    PENDING = auto()  # the same, and any use waits
    FAILED = auto()  # they will never get them: any use raises


_NEXT_STATES = {
    GatherState.DONE: (GatherState.STARTED,),
    GatherState.STARTED: (GatherState.PENDING, GatherState.DONE),
    GatherState.PENDING: (GatherState.DONE, GatherState.FAILED),
    GatherState.FAILED: (GatherState.DONE,),  # when lost ranks have been replaced
}


class UpdateGather:
    """One gather: some parameters, which all ranks have updated in parts."""

    def __init__(self, shards: Sequence[Shard], make: Callable[[Mapping[int, torch.Tensor], str], BlockGather]) -> None:
        """`make` creates a gather of tensors that are cut like those of `shards`, in place, with a name for them."""
        self._shards = list(shards)
        self.params = [shard.param for shard in shards]
        self._memory = [param.untyped_storage() for param in self.params]
        names = [shard.name for shard in shards]
        listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        before = [_uses_of(memory) for memory in self._memory]
        self._gather = make(dict(enumerate(self.params)), listed)
        views = [_uses_of(memory) - uses for memory, uses in zip(self._memory, before, strict=True)]
        # References: the parameter, the caller, the optimizer's tensor unless it is wider, and paceline's own views.
        self._uses = [_uses_by_one() + 1 + count for count in views]
        self._queued: QueuedWork | None = None
        self._stepped_on: torch.cuda.Stream | None = None
        self._class: type[nn.Parameter] | None = None
        self._failure: Exception | None = None
        self.state = GatherState.DONE
        self._what = f"the parameters that other ranks have updated ({listed})"

    def start(self, group: Group) -> None:
        self._move(GatherState.STARTED)
        self._gather.start(group)

    def queue(self, group: Group, side: SideStream, following: "UpdateGather | None" = None) -> None:
        """Start it on a stream of its own, if that is all that the host has to do. This rank's part of the `following`
        gather is sent before this one is waited for, so that the link is never idle."""
        self._move(GatherState.STARTED)
        device = self.params[0].device
        self._stepped_on = torch.cuda.current_stream(device)
        uses = self.params if following is None else [*self.params, *following.params]
        self._queued = side.run(self._steps(group, following), device, uses=uses)

    def _steps(self, group: Group, following: "UpdateGather | None") -> Steps:
        self._gather.start(group)
        if following is not None:
            following._gather.start(group)
        self._gather.finish(group, self._what, beside=True)  # orders the stream, not the host
        yield from ()

    def unseen(self, opaque: Set[int]) -> bool:
        """Whether code could use the parameters without being detected."""
        return (
            any(type(param) is not nn.Parameter for param in self.params)
            or not opaque.isdisjoint(map(id, self.params))
            or self._others_look_at_memory()
        )

    def _others_look_at_memory(self) -> bool:
        found = zip(self._shards, self._memory, self._uses, strict=True)
        return any(_uses_of(memory) != uses - shard.has_master for shard, memory, uses in found)

    def make_pending(self, wait: Callable[["UpdateGather"], None]) -> None:
        """From now on any use of a parameter first calls `wait`."""
        self._move(GatherState.PENDING)
        if self._class is None:
            self._class = pending_class(lambda: wait(self))
        torch.autograd.graph.increment_version(self.params)  # a backward through earlier results must not run
        for param in self.params:
            param.__class__ = self._class

    def finish(self, group: Group) -> None:
        """Wait for the values, if they have not arrived."""
        if self.state is GatherState.DONE:
            return
        if self._failure is not None:
            raise copy.copy(self._failure)  # without a traceback, which would keep objects of the first failure alive
        try:
            with torch.no_grad():
                self._arrive(group)
        except Exception as error:
            if self.state is GatherState.PENDING:
                self.fail(error)
            raise
        self._move(GatherState.DONE)
        self._give_back_class()

    def _give_back_class(self) -> None:
        for param in self.params:
            if type(param) is self._class:
                param.__class__ = nn.Parameter

    def _arrive(self, group: Group) -> None:
        if self._queued is None:
            self._gather.finish(group, self._what)
        elif not torch.cuda.is_current_stream_capturing():  # starting a capture waits for the device
            self._gather.stamp(Moment.WAIT_ENTERED)
            self._queued.wait(0.0)
            self._gather.stamp(Moment.WAIT_LEFT)
            with torch.cuda.stream(self._stepped_on):  # uses on another stream are ordered after this one
                self._queued.wait(0.0)
        self._queued = None

    def comes(self, group: Group, seconds: float) -> bool:
        """Whether the values arrive within `seconds`."""
        return self._queued is not None or self._gather.comes(group, self._what, max(seconds, 0.0))

    def lose(self, error: Exception, wait: Callable[["UpdateGather"], None]) -> None:
        """Ranks were lost before the values of an update were gathered: any use of them raises."""
        if self.state is GatherState.DONE:
            self._move(GatherState.STARTED)
        if self.state is GatherState.STARTED:
            self.make_pending(wait)
        if self.state is GatherState.PENDING:
            self.fail(error)

    def forget(self) -> None:
        """The group has ended: drop the gather. The parameters' contents are the caller's concern."""
        self._gather.forget()
        self._queued = self._failure = None
        if self.state is not GatherState.DONE:
            self._move(GatherState.DONE)
            self._give_back_class()

    def fail(self, error: Exception) -> None:
        """From now on any use of the parameters raises the reason why they have no values."""
        self._move(GatherState.FAILED)
        self._failure = copy.copy(error)

    def _move(self, to: GatherState) -> None:
        if to not in _NEXT_STATES[self.state]:
            raise IllegalMove(f"{self._what} cannot go from {self.state.name} to {to.name}")
        self.state = to


def _uses_of(memory: torch.UntypedStorage) -> int:
    """The number of references to the storage: tensors, and this object."""
    return torch._C._storage_Use_Count(memory._cdata)


def _uses_by_one() -> int:
    one = torch.empty(1, device="cpu")
    return _uses_of(one.untyped_storage())
