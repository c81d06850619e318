"""The step guard: no optimizer steps on gradients that were never reduced."""

import logging
import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.errors import UnreducedGradients
from paceline.reducer.reducer import Reducer
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
        module: nn.Module,
        managed: Container[int],
        ignored: Container[str],
        *,
        refuses: bool,
    ) -> None:
        self._reducer = weakref.ref(reducer)
        self._module = weakref.ref(module)
        self._managed = managed
        self._ignored = ignored
        self._refuses = refuses
        self._closed = False
        self._stepping: set[int] = set()  # ids of optimizers; one may step inside another's step
        _remove_closed_guards()
        self._handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Look no more. The hook itself is removed when the next guard is made: a replica may be collected while some
        optimizer steps, which is when torch walks through the hooks."""
        self._closed = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.discard(id(optimizer))  # of one that failed in its step and is gone
        reducer, module = self._reducer(), self._module()
        if reducer is None or module is None or self._closed:
            return
        params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        refuses = self._refuses and not reducer.ledger.local_steps
        if refuses:
            self._refuse_unmanaged(module, params)
        if not any(param in self._managed for param in params):
            return
        if reducer.on_finished is not None:
            reducer.on_finished()
        if reducer.in_backward:
            if not reducer.optimizes_in_backward:
                raise UnreducedGradients(IN_BACKWARD)
            return
        if reducer.lanes is not None and reducer.lanes.under_way:
            raise UnreducedGradients(
                f"the optimizer steps though only {reducer.lanes.run} of the {len(reducer.lanes.mine)} lanes of this "
                f"rank have run, so there are no gradients of this step yet; step after the loop over model.lanes()"
            )
        if reducer.others_wait():
            logger.warning(JOINED, reducer.transport.rank)
            reducer.reduce_now()
        if refuses:
            names = reducer.ledger.unreduced(reducer.set.slots, params, syncs=reducer.sync_on)
            if names:
                raise UnreducedGradients(_message(names))
        reducer.ledger.stepped()
        if reducer.oversight is not None:
            reducer.oversight.note_optimizer(optimizer, local=reducer.ledger.local_steps > 0)
        self._stamp_begin(optimizer, reducer)

    def _stamp_begin(self, optimizer: Optimizer, reducer: Reducer) -> None:
        if not torch.compiler.is_dynamo_compiling():  # it cannot trace a clock, and warns
            self._stepping.add(id(optimizer))
            reducer.trace.stamp(Moment.OPTIMIZER_BEGIN, reducer.reductions)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and id(optimizer) in self._stepping:
            self._stepping.discard(id(optimizer))
            if (reducer := self._reducer()) is not None:
                reducer.trace.stamp(Moment.OPTIMIZER_END, reducer.reductions)

    def _refuse_unmanaged(self, module: nn.Module, params: dict[int, torch.Tensor]) -> None:
        """Parameters that came, or were unfrozen, after wrapping: nobody reduces their gradients."""
        unmanaged = [p for key, p in params.items() if key not in self._managed and p.grad is not None]
        if unmanaged:
            names = {id(p): name for name, p in module.named_parameters() if name not in self._ignored}
            found = [names[id(p)] for p in unmanaged if id(p) in names]
            if found:
                raise UnreducedGradients(
                    f"{_listed(found)} became trainable, or took another parameter's place, after wrapping, so no one "
                    f"reduces the gradients; wrap the module again after such a change, or pass guard=False"
                )


def _remove_closed_guards() -> None:
    for hook in list(_global_optimizer_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, StepGuard) and owner._closed:
            for handle in owner._handles:
                handle.remove()


def live_replicas() -> list[tuple[nn.Module, Reducer]]:
    """The modules that are wrapped in this process, oldest first, each with its reducer.

    Every replica has a guard among torch's hooks, so nobody else has to keep a list.
    """
    owners = [getattr(hook, "__self__", None) for hook in list(_global_optimizer_pre_hooks.values())]
    guards = [owner for owner in owners if isinstance(owner, StepGuard) and not owner._closed]
    found = [(guard._module(), guard._reducer()) for guard in guards]
    return [(module, reducer) for module, reducer in found if module is not None and reducer is not None]


def _message(names: list[str]) -> str:
    return (
        f"the optimizer was about to step on gradients that were never reduced, so the replicas would drift apart: "
        f"{_listed(names)}. Run the last backward of the step outside no_sync(), or call sync_gradients() before "
        f"step(). To step on local gradients on purpose, step inside no_sync(), or pass guard=False."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
