"""Before an update on a device: invalid gradients change nothing, and the host does not wait for that.

Whether gradients are finite, and whether some rank's are missing, is known on the device alone when the optimizer is
called. torch's fused optimizers take such a flag (`found_inf`, as GradScaler gives it to them) and then change nothing.
For any other optimizer the host has to know: it waits, once, and only if the check is enabled.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from paceline.collectives.wait import EventWork
from paceline.reducer.reducer import Reducer

KEPT = 64  # checks that were not queried


@dataclass(frozen=True, slots=True)
class _PendingCheck:
    """A check for finite gradients whose result is on its way to the host."""

    number: int  # of the reduction
    names: list[str]
    finite: torch.Tensor
    work: EventWork

    def bad(self) -> list[str]:
        return [name for name, fine in zip(self.names, self.finite.tolist(), strict=True) if not fine]


class UpdateGate:
    """Gates the optimizers of one replica whose collectives are ordered by streams."""

    def __init__(self, reducer: Reducer, names: Mapping[int, str], *, looks: bool) -> None:
        """`names` of parameters, by their ids. `looks`: gradients that are not finite must not be used."""
        self._reducer = reducer
        self._names = names
        self._checks = looks
        self._pending: deque[_PendingCheck] = deque(maxlen=KEPT)
        self.found_before: dict[int, Any] = {}  # optimizers about to step, by id: their previous `found_inf`
        self._steps = 0
        # In a world of one, which has no reports: called a step later with the step and the names of bad gradients.
        self.on_checked: Callable[[int, list[str]], None] | None = None

    def before_update(self, optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
        """An optimizer is about to step on `params`, where streams order collectives. Make it change nothing if their
        gradients must not be used."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._report_single()
        owned = [p for p in params if p.grad is not None and id(p) in self._names] if self._checks else []
        flags = [*self._broken(), *self._not_finite(owned)]
        if not flags:
            return
        flag = flags[0] if len(flags) == 1 else torch.maximum(*flags)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._set_found_inf(optimizer, flag)
        elif self._checks and self._wait_for(flag):
            for param in owned:
                param.grad = None

    def _report_single(self) -> None:
        self._steps += 1
        while self.on_checked is not None and self._pending:
            check = self._pending.popleft()
            self._reducer.wait(check.work, f"whether the gradients of step {check.number} are finite")
            self.on_checked(check.number, check.bad())

    def after_update(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped: restore its `found_inf`."""
        if id(optimizer) in self.found_before:
            before = self.found_before.pop(id(optimizer))
            if before is None:
                del optimizer.found_inf  # type: ignore[attr-defined]
            else:
                optimizer.found_inf = before  # type: ignore[attr-defined]

    def begin_anew(self) -> None:
        """The count of reductions restarts: drop earlier checks."""
        self._pending.clear()

    def bad_in(self, number: int) -> list[str]:
        """The parameters whose gradients were not finite when optimizers stepped on what was reduced up to reduction
        `number`. Waits for the device if necessary."""
        found: list[str] = []
        while self._pending and self._pending[0].number <= number:
            check = self._pending.popleft()
            self._reducer.wait(check.work, f"whether the gradients of reduction {check.number} are finite")
            found += check.bad()
        return found

    def _broken(self) -> list[torch.Tensor]:
        """1 if some rank had no gradients for this reduction, or had some that arrived too late."""
        reducer = self._reducer
        if not reducer.reports.unread or reducer.group.single:
            return []
        pending = reducer.reports.unread[-1]
        if pending.broken is None:
            return []
        return [pending.broken.amax()]

    def _not_finite(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """1 if some gradient is not finite. Which one it is goes to the host, for later queries."""
        grads = [p.grad for p in params if p.grad is not None]
        if not self._checks or not grads or any(g.layout is not torch.strided for g in grads):
            return []
        with torch.no_grad():
            finite = torch.stack([n.float() for n in torch._foreach_norm(grads, math.inf)]).isfinite()
            host = torch.empty(len(grads), dtype=torch.bool, device="cpu", pin_memory=True)
            host.copy_(finite, non_blocking=True)
            event = torch.cuda.current_stream(finite.device).record_event()
            names = [self._names[id(p)] for p in params]
            number = self._reducer.reductions_begun if self.on_checked is None else self._steps
            self._pending.append(_PendingCheck(number, names, host, EventWork(event)))
            return [finite.all().logical_not().float()]

    def _set_found_inf(self, optimizer: Optimizer, flag: torch.Tensor) -> None:
        before = getattr(optimizer, "found_inf", None)  # a GradScaler's
        self.found_before[id(optimizer)] = before
        flag = flag if before is None else torch.maximum(flag, before.to(flag.device).view(()))
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        if self._reducer.reports.unread:
            self._reducer.reports.unread[-1].gated = True

    def _wait_for(self, flag: torch.Tensor) -> bool:
        host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
        host.copy_(flag, non_blocking=True)
        event = torch.cuda.current_stream(flag.device).record_event()
        self._reducer.wait(EventWork(event), "whether gradients are finite")
        return bool(host)
