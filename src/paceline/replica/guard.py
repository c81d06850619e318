"""The step guard: no optimizer steps on gradients that were never reduced."""

import functools
import logging
import threading
import weakref
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.errors import UnreducedGradients
from paceline.progress import Phase, own_progress
from paceline.reducer.participation import reduce_now
from paceline.reducer.reducer import Reducer
from paceline.replica.closures import with_closure
from paceline.replica.gate import UpdateGate
from paceline.replica.owned import OwnedBlocks
from paceline.replica.refusals import IN_BACKWARD, JOINED, refuse_whole, unreduced_error
from paceline.replica.strangers import Strangers
from paceline.trace import Moment

logger = logging.getLogger("paceline")


class StepGuard:
    """Checks every optimizer step in the process that updates parameters of one replica."""

    def __init__(
        self, reducer: Reducer, replica: nn.Module, strangers: Strangers, *, refuses: bool, gate: UpdateGate
    ) -> None:
        self._gate = weakref.ref(gate)
        self.reducer = weakref.ref(reducer)
        self.replica = weakref.ref(replica)
        self._managed = strangers.managed
        self._strangers = strangers
        self._refuses = refuses
        self._closed = False
        self._stepping: set[int] = set()  # ids of optimizers; one may step inside another's step
        self._unchecked: set[int] = set()  # of those, the ones that have not run their closure
        guards.add(self)

    @property
    def _owned(self) -> OwnedBlocks | None:
        """This rank's blocks of the parameters, if optimizers update these instead."""
        return getattr(self.replica(), "_owned", None)

    @property
    def module(self) -> nn.Module | None:
        """The currently wrapped module, which may have been replaced, for instance by a compiled one."""
        replica = self.replica()
        return None if replica is None else replica.get_submodule("module")

    def close(self) -> None:
        """Stop checking."""
        self._closed = True
        guards.remove(self)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._stepping.discard(id(optimizer))  # of an optimizer that failed in its step and was released
        self._unchecked.discard(id(optimizer))
        reducer = self.reducer()
        if reducer is None or self._closed:
            return None
        if not callable(kwargs.get("closure", args[1] if len(args) > 1 else None)):
            if self._begin_update(optimizer):
                self._stamp_begin(optimizer, reducer)
            return None
        if not self._managed.isdisjoint(map(id, self._params_of(optimizer))):
            self._refuse_in_backward(reducer)
            self._stamp_begin(optimizer, reducer)
        self._unchecked.add(id(optimizer))
        return with_closure(args, kwargs, functools.partial(self._begin_update, optimizer))

    def _begin_update(self, optimizer: Optimizer) -> bool:
        """Start an update, unless it is refused. Returns whether it changes this replica. A closure computes gradients,
        and may complete an accumulation: with one, this is called each time it returns."""
        self._unchecked.discard(id(optimizer))
        reducer = self.reducer()
        if reducer is None or self.replica() is None or self._closed or not self._check_step(optimizer, reducer):
            return False
        reducer.step_state.stepped()
        reducer.step_state.begin_update(id(optimizer))
        if reducer.schedule.observer is not None:
            reducer.schedule.observer.note_optimizer(optimizer, local=reducer.step_state.local_steps > 0)
        if reducer.schedule.stream_ordered and (gate := self._gate()) is not None:
            gate.before_update(optimizer, _params_of(optimizer))
        return True

    def _check_step(self, optimizer: Optimizer, reducer: Reducer) -> bool:
        """Refuse a step on gradients that were not reduced. Returns whether the step changes this replica."""
        refuses = self._refuses and not reducer.step_state.local_steps
        params = self._params_of(optimizer)
        ids = set(map(id, params))
        if refuses and not ids <= self._managed:
            self._strangers.refuse_among(params, self.module)
        if ids.isdisjoint(self._managed):
            return False
        if self._owned is not None and self._owned.cut:
            refuse_whole(_params_of(optimizer), self._owned, local=reducer.step_state.local_steps > 0)
        for call in reducer.callbacks.finished:
            call()
        if self._refuse_in_backward(reducer):
            return False
        if refuses and self._strangers.possible:
            self._strangers.refuse(self.module, self._owned)
        reducer.batch.check_update()
        if reducer.others_wait():
            logger.warning(JOINED, reducer.transport.rank)
            reduce_now(reducer)
        if refuses and (names := reducer.step_state.unreduced(reducer.bucket_set.slots, ids, syncs=reducer.sync_on)):
            raise unreduced_error(names)
        return True

    def _params_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters that the optimizer changes, including those of which it holds this rank's blocks."""
        params = _params_of(optimizer)
        if self._owned is None:
            return params
        found = [(param, self._owned.find(param)) for param in params]
        return [param if shard is None else shard.param for param, shard in found]

    def _refuse_in_backward(self, reducer: Reducer) -> bool:
        """Whether a backward is running in which an optimizer may step."""
        if reducer.backwards.running() and not reducer.optimizes_in_backward:
            raise UnreducedGradients(IN_BACKWARD)
        return reducer.backwards.running()

    def _stamp_begin(self, optimizer: Optimizer, reducer: Reducer) -> None:
        self._stepping.add(id(optimizer))
        reducer.trace.stamp(Moment.OPTIMIZER_BEGIN, reducer.reductions_begun)
        own_progress().note(Phase.OPTIMIZER)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._unchecked:  # it never called its closure: too late to prevent, but do not hide it
            self._begin_update(optimizer)
        if id(optimizer) in self._stepping:
            if (gate := self._gate()) is not None and gate.found_before:
                gate.after_update(optimizer)
            self._stepping.discard(id(optimizer))
            if (reducer := self.reducer()) is not None:
                reducer.step_state.end_update(id(optimizer))
                reducer.trace.stamp(Moment.OPTIMIZER_END, reducer.reductions_begun)
            if not self._stepping:  # a step inside another one does not count
                own_progress().stepped()


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


class _Guards:
    """The guards of all replicas of this process: a single list.

    torch walks through its own list of hooks whenever some optimizer steps. Replicas come and go meanwhile, on other
    threads and by garbage collection, so torch's list holds a single paceline hook for the life of the process, and
    this list is replaced and never changed.
    """

    def __init__(self) -> None:
        self._all: tuple[StepGuard, ...] = ()
        self._lock = threading.Lock()
        self._hooked = False

    def add(self, guard: StepGuard) -> None:
        with self._lock:
            self._all = (*self._all, guard)
            if not self._hooked:
                register_optimizer_step_pre_hook(self.before_step)
                register_optimizer_step_post_hook(self.after_step)
                self._hooked = True

    def remove(self, guard: StepGuard) -> None:
        # Without the lock: a replica may be collected while this thread holds it.
        self._all = tuple(other for other in self._all if other is not guard)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for guard in self._all:
            args, kwargs = guard.before_step(optimizer, args, kwargs) or (args, kwargs)
        return args, kwargs

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for guard in self._all:
            guard.after_step(optimizer, args, kwargs)

    def live(self) -> list[StepGuard]:
        return [guard for guard in self._all if not guard._closed]


guards = _Guards()
