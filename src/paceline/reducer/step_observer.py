"""Observers of steps: they add fields to step reports, and decide from those of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import StepReport


@dataclass(frozen=True, slots=True)
class Findings:
    """A rank's findings about its state and the sums. A tensor is known on the device only."""

    state: int | torch.Tensor = 0  # digest of a part of the state: must be equal
    signature: int = 0  # digest of the state's structure; 0: do not compare this rank's state
    not_finite: int | torch.Tensor = 0  # what is not finite: see agree/finite.py


@dataclass(frozen=True, slots=True)
class Decision:
    """The consequence, the same on every rank."""

    drops_gradients: bool = False  # so that an optimizer that steps changes nothing
    error: Exception | None = None  # to be raised once everything is restored


class StepObserver(Protocol):
    """All ranks of a replica have one, with the same settings, or none has."""

    @property
    def looks_at_sums(self) -> bool:
        """Whether `findings` are complete only when all buckets are reduced: the report then waits for them."""
        ...

    def begin(self, number: int) -> None:
        """Step `number` of lanes begins, or reduction `number`. The state is that after the last step."""
        ...

    def look_at_own(self, parts: Sequence[torch.Tensor]) -> None:
        """These gradients of this rank are about to be reduced."""
        ...

    def findings(self, sums: Sequence[torch.Tensor], *, on_device: bool) -> Findings:
        """`sums`: the reduced gradients, if they are checked. `on_device`: the report is sent from there, so nothing is
        waited for."""
        ...

    def decide(self, rows: Sequence[StepReport], slots: Sequence[GradSlot] | None) -> Decision:
        """All ranks have reported, and the views of `slots` hold the reduced gradients. None: the report is of an
        earlier reduction, whose step is over. May start collectives, on all ranks alike."""
        ...

    def stop_comparing(self) -> None:
        """Replicas are no longer meant to be equal. All ranks call it."""
        ...

    def note_optimizer(self, optimizer: object, *, local: bool) -> None:
        """An optimizer is about to step. `local`: intentionally on unreduced gradients, so replicas differ."""
        ...
