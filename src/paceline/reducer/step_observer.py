"""What looks after more than gradients: it adds to step reports, and decides what follows from those of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import StepReport


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank tells the others of its state and of the sums it has seen. A tensor: only the device knows it."""

    state: int | torch.Tensor = 0  # digest of a part of the state: must be equal
    signature: int = 0  # digest of what the state is made of; 0: this rank's is not to be compared
    not_finite: int | torch.Tensor = 0  # what was found not to be finite: see agree/finite.py


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows, the same on every rank."""

    drops_gradients: bool = False  # so that an optimizer that steps changes nothing
    error: Exception | None = None  # to be raised once everything is in its place


class StepObserver(Protocol):
    """All ranks of a replica have one, with the same settings, or none has."""

    @property
    def looks_at_sums(self) -> bool:
        """Whether `findings` are complete only when all buckets are reduced: the report then waits for them."""
        ...

    def begin(self, number: int) -> None:
        """Step `number` of lanes begins, or reduction `number`. The state is as the last step has left it."""
        ...

    def look_at_own(self, parts: Sequence[torch.Tensor]) -> None:
        """These gradients of this rank are about to be reduced."""
        ...

    def findings(self, sums: Sequence[torch.Tensor], *, on_device: bool) -> Findings:
        """`sums`: what was reduced, if it is looked at. `on_device`: the report is sent from there, so nothing is
        waited for."""
        ...

    def decide(self, rows: Sequence[StepReport], slots: Sequence[GradSlot] | None) -> Decision:
        """All have reported, and the views of `slots` hold what was reduced. None: the report is of an earlier
        reduction, whose step is over. May start collectives: all ranks do."""
        ...

    def stop_comparing(self) -> None:
        """Replicas are not meant to be equal any more. All ranks call it."""
        ...

    def note_optimizer(self, optimizer: object, *, local: bool) -> None:
        """An optimizer is about to step. `local`: on purpose on gradients that were not reduced, so replicas differ."""
        ...
