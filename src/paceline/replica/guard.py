"""The step guard: no optimizer steps on gradients that were never reduced."""

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.errors import UnreducedGradients
from paceline.reducer.reducer import Reducer

SHOWN = 5


class StepGuard:
    """Looks at every optimizer step in the process, and acts on those that own parameters of one replica."""

    def __init__(self, reducer: Reducer, params: set[int], *, refuses: bool) -> None:
        self._reducer = weakref.ref(reducer)
        self._params = params
        self._refuses = refuses
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        reducer = self._reducer()
        if reducer is None or not self._owns_ours(optimizer):
            return
        reducer.join_with_zeros_if_others_wait()
        if self._refuses and reducer.sync_on:
            names = reducer.unreduced()
            if names:
                raise UnreducedGradients(_message(names))
        reducer.reductions_since_step = 0
        reducer.forwards_since_step = 0

    def _owns_ours(self, optimizer: Optimizer) -> bool:
        if optimizer in self._ours:
            return True
        if any(id(p) in self._params for group in optimizer.param_groups for p in group["params"]):
            self._ours.add(optimizer)
            return True
        return False


def _message(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return (
        f"the optimizer was about to step on gradients that were never reduced, so the replicas would drift apart: "
        f"{shown}. Run the last backward of the step outside no_sync(), or call sync_gradients() before step(). "
        f"To step on local gradients on purpose, step inside no_sync(), or pass guard=False."
    )
