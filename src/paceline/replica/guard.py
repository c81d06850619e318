"""The step guard: no optimizer steps on gradients that were never reduced."""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Container
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
from paceline.reducer.reducer import Reducer
from paceline.reducer.taking_part import reduce_now
from paceline.replica.gate import UpdateGate
from paceline.trace import Moment

logger = logging.getLogger("paceline")

SHOWN = 5
IN_BACKWARD = (
    "an optimizer steps inside backward, before the gradients of this step are reduced, so the replicas would drift "
    "apart; use torch.distributed.optim._apply_optimizer_in_backward, which waits for the reduction, or step after it"
)
JOINED = (
    "the loss of rank %d touched no parameter, so it joined the reduction of this step only now, at optimizer.step(): "
    "what was done to gradients before, such as clipping, was not done here. Call model.sync_gradients() after "
    "backward to join earlier"
)


class StepGuard:
    """Looks at every optimizer step in the process, and acts on those that own parameters of one replica."""

    def __init__(
        self,
        reducer: Reducer,
        replica: nn.Module,
        managed: frozenset[int],
        ignored: Container[str],
        *,
        refuses: bool,
        gate: UpdateGate,
    ) -> None:
        self._gate = weakref.ref(gate)
        self._reducer = weakref.ref(reducer)
        self._replica = weakref.ref(replica)
        self._managed = managed
        self._ignored = ignored
        self._refuses = refuses
        self._closed = False
        self._stepping: set[int] = set()  # ids of optimizers; one may step inside another's step
        self._unjudged: set[int] = set()  # of those, the ones that have not run the closure they were given
        _guards.add(self)

    @property
    def module(self) -> nn.Module | None:
        """What the replica has wrapped now: it may be given another module, such as a compiled one."""
        replica = self._replica()
        return None if replica is None else replica.get_submodule("module")

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        _guards.remove(self)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._stepping.discard(id(optimizer))  # of one that failed in its step and is gone
        self._unjudged.discard(id(optimizer))
        reducer = self._reducer()
        if reducer is None or self._closed:
            return None
        if not _has_closure(args, kwargs):
            if self._judge(optimizer):
                self._stamp_begin(optimizer, reducer)
            return None
        if not self._managed.isdisjoint(map(id, _params_of(optimizer))):
            self._refuse_in_backward(reducer)
            self._stamp_begin(optimizer, reducer)
        self._unjudged.add(id(optimizer))
        return _with_closure(args, kwargs, functools.partial(self._judge, optimizer))

    def _judge(self, optimizer: Optimizer) -> bool:
        """Refuse a step on gradients that were not reduced. Returns whether the step changes this replica.

        The closure of a step makes gradients, and may complete an accumulation, so a step that has one is judged when
        the closure returns, each time.
        """
        self._unjudged.discard(id(optimizer))
        reducer = self._reducer()
        if reducer is None or self._replica() is None or self._closed:
            return False
        refuses = self._refuses and not reducer.ledger.local_steps
        params = _params_of(optimizer)
        ids = set(map(id, params))
        if refuses and not ids <= self._managed:
            self._refuse_unmanaged([p for p in params if id(p) not in self._managed and p.grad is not None])
        if ids.isdisjoint(self._managed):
            return False
        if reducer.on_finished is not None:
            reducer.on_finished()
        if self._refuse_in_backward(reducer):
            return False
        if reducer.lanes is not None and reducer.lanes.under_way:
            raise UnreducedGradients(
                f"the optimizer steps though only {reducer.lanes.run} of the {len(reducer.lanes.mine)} lanes of this "
                f"rank have run, so there are no gradients of this step yet; step after the loop over model.lanes()"
            )
        if reducer.others_wait():
            logger.warning(JOINED, reducer.transport.rank)
            reduce_now(reducer)
        if refuses:
            names = reducer.ledger.unreduced(reducer.set.slots, ids, syncs=reducer.sync_on)
            if names:
                raise UnreducedGradients(_message(names))
        reducer.ledger.stepped()
        reducer.ledger.begin_update(id(optimizer))
        if reducer.oversight is not None:
            reducer.oversight.note_optimizer(optimizer, local=reducer.ledger.local_steps > 0)
        if reducer.ordered_by_streams and (gate := self._gate()) is not None:
            gate.close(optimizer, params)
        return True

    def _refuse_in_backward(self, reducer: Reducer) -> bool:
        """Whether a backward runs, of the kind that an optimizer may step in."""
        if reducer.in_backward and not reducer.optimizes_in_backward:
            raise UnreducedGradients(IN_BACKWARD)
        return reducer.in_backward

    def _stamp_begin(self, optimizer: Optimizer, reducer: Reducer) -> None:
        self._stepping.add(id(optimizer))
        reducer.trace.stamp(Moment.OPTIMIZER_BEGIN, reducer.reductions)
        own_progress().note(Phase.OPTIMIZER)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._unjudged:  # it never called its closure: too late to refuse, but no drift in silence
            self._judge(optimizer)
        if id(optimizer) in self._stepping:
            if (gate := self._gate()) is not None and gate.closed:
                gate.open(optimizer)
            self._stepping.discard(id(optimizer))
            if (reducer := self._reducer()) is not None:
                reducer.ledger.end_update(id(optimizer))
                reducer.trace.stamp(Moment.OPTIMIZER_END, reducer.reductions)
            if not self._stepping:  # one that steps inside another is no step of its own
                own_progress().stepped()

    def _refuse_unmanaged(self, params: list[torch.Tensor]) -> None:
        """Parameters that came, or were unfrozen, after wrapping: nobody reduces their gradients."""
        module = self.module
        named = () if module is None else module.named_parameters()
        names = {id(p): name for name, p in named if name not in self._ignored}
        found = [names[id(p)] for p in params if id(p) in names]
        if found:
            raise UnreducedGradients(
                f"{_listed(found)} became trainable, or took another parameter's place, after wrapping, so no one "
                f"reduces the gradients; wrap the module again after such a change, or pass guard=False"
            )


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _has_closure(args: Any, kwargs: Any) -> bool:
    return callable(kwargs.get("closure", args[1] if len(args) > 1 else None))


def _with_closure(args: Any, kwargs: Any, then: Callable[[], object]) -> tuple[Any, Any]:
    """The arguments of an optimizer's step, with a closure that calls `then` before it returns."""
    given = kwargs["closure"] if "closure" in kwargs else args[1]

    @functools.wraps(given)
    def closure(*inputs: Any, **named: Any) -> Any:
        result = given(*inputs, **named)
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


class _Guards:
    """The guards of all replicas of this process: the one list of them.

    torch walks through its own list of hooks whenever some optimizer steps. Replicas come and go meanwhile, on other
    threads and by garbage collection, so torch's list holds one hook of ours for the life of the process, and this list
    is replaced and never changed.
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


_guards = _Guards()


def live_replicas() -> list[tuple[nn.Module, Reducer]]:
    """The modules that are wrapped in this process, oldest first, each with its reducer."""
    found = [(guard.module, guard._reducer()) for guard in _guards.live()]
    return [(module, reducer) for module, reducer in found if module is not None and reducer is not None]


def _message(names: list[str]) -> str:
    return (
        f"the optimizer was about to step on gradients that were never reduced, so the replicas would drift apart: "
        f"{_listed(names)}. Run the last backward of the step outside no_sync(), or call sync_gradients() before "
        f"step(). To step on local gradients on purpose, step inside no_sync(), or pass guard=False."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
