"""Objects that a script uses without having declared them would be lost, or updated twice, when a rank takes over the
state of another. They are refused when they are found: an optimizer and its GradScaler before the update, a replica
before the commit, and objects that distribute samples or save in the line that uses them.
"""

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint import Checkpointer
from paceline.data.loader import Loader
from paceline.elastic.transaction import StepMark, Transaction
from paceline.errors import IllegalMove, UsageError
from paceline.in_use import uses
from paceline.replica.live import all_replicas

# Between an optimizer's hook and the scaler that has called its step(): the wrappers of torch, of a scheduler, and of
# paceline.
CALLERS = 12


class UpdateWatch:
    """Checks that every optimizer step of this process is inside `commit()`, by a declared optimizer."""

    def __init__(self, transaction: Transaction, things: Collection[Any]) -> None:
        self._transaction = transaction
        self._declared = {id(thing) for thing in things}
        self._stepping = 0  # an optimizer may step inside the step of another, which is the declared one
        own = weakref.ref(self)

        def before(optimizer: Optimizer, *_: Any) -> None:
            if (watch := own()) is not None:
                watch._before(optimizer)

        def after(*_: Any) -> None:
            if (watch := own()) is not None:
                watch._stepping -= 1

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        self._removal = weakref.finalize(self, _remove, hooks)  # also if a script was interrupted

    def close(self) -> None:
        """Stop watching."""
        self._removal()

    def forget(self) -> None:
        """An update ended with an exception."""
        self._stepping = 0

    def _before(self, optimizer: Optimizer) -> None:
        mark, declared = self._transaction.mark, id(optimizer) in self._declared
        if self._stepping or (not declared and mark not in (StepMark.ATTEMPTING, StepMark.UPDATING)):
            pass  # of no concern to this run
        elif not declared:
            raise UsageError(
                f"a {type(optimizer).__name__} that was not declared to paceline.Elastic was about to step, so a rank "
                f"that takes over the state of another would lack its changes: declare it, as in "
                f"Elastic(model=model, optimizer=optimizer, second_optimizer=...)"
            )
        elif mark is not StepMark.UPDATING:
            raise IllegalMove(
                f"{type(optimizer).__name__}.step() was called outside `with run.commit():`, so it would not be "
                f"known whether step {self._transaction.step} was made: call it there, like scheduler.step()"
            )
        elif (scaler := _scaler_of_step()) is not None and id(scaler) not in self._declared:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called by a {type(scaler).__name__} that was not declared to "
                f"paceline.Elastic, so a new rank would scale its losses differently: declare it, as in "
                f"Elastic(model=model, optimizer=optimizer, scaler=scaler)"
            )
        self._stepping += 1


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class UndeclaredReplicas:
    """Finds replicas that are trained in an attempt without having been declared."""

    def __init__(self, declared: Sequence[Any]) -> None:
        self._declared = declared
        self._begun = 0

    def note(self) -> None:
        """An attempt begins."""
        self._begun = sum(replica._core.reductions_begun for replica in self._others())

    def check(self) -> None:
        """Raise UsageError if an undeclared replica has reduced gradients since."""
        others = self._others()
        if sum(replica._core.reductions_begun for replica in others) > self._begun:
            names = ", ".join(sorted({type(replica.module).__name__ for replica in others}))
            raise UsageError(
                f"a replica that was not declared to paceline.Elastic is being trained ({names}), so a new rank would "
                f"lack its state: declare it, as in Elastic(model=model, critic=critic, ...)"
            )

    def _others(self) -> list[Any]:
        return [one for one in all_replicas() if not any(one is known for known in self._declared)]


class UndeclaredUses:
    """Refuses undeclared objects that distribute samples or save inside an attempt."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._declared = {id(thing) for thing in things}

    def begin(self) -> None:
        """An attempt begins."""
        uses.add(self._check)

    def end(self) -> None:
        """The attempt has ended, with or without an error."""
        uses.remove(self._check)

    def _check(self, thing: object) -> None:
        if id(thing) in self._declared:
            return
        name, lacks = "sampler", "produce other samples"
        if isinstance(thing, Loader):
            name = "loader"
        elif isinstance(thing, Checkpointer):
            name, lacks = "checkpoints", "save together with ranks that have left"
        raise UsageError(
            f"a {type(thing).__name__} that was not declared to paceline.Elastic is used in an attempt, so when ranks "
            f"join or leave it would {lacks}: declare it: Elastic(model=model, optimizer=optimizer, {name}={name})"
        )


def _scaler_of_step() -> GradScaler | None:
    """The scaler whose step() calls the optimizer's step() that is about to run; None if there is none. torch has no
    hook for this, so the call stack is searched."""
    frame = sys._getframe(1)
    for _ in range(CALLERS):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is GradScaler.step.__code__:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None
