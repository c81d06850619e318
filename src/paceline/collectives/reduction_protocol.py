"""The protocols that reductions implement: one for all, and some optional ones. The plain mean is in `reduction`, the
others in `strategies`."""

from typing import Protocol, runtime_checkable

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.reduction import Flight, GradBucket


class Reduction(Protocol):
    """Combines one bucket over all ranks."""

    def divides(self, transport: Transport, device: torch.device) -> bool:
        """Whether it divides by the number of ranks itself; else gradients are divided on their way in."""
        ...

    @property
    def multi_step(self) -> bool:
        """True when it may start further collectives as earlier ones complete, so that nothing else may be started
        between them: ranks would disagree about the order."""
        ...

    @property
    def trivial_alone(self) -> bool:
        """True when it changes nothing in a world of one, so that gradients need no buckets there."""
        ...

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight: ...


@runtime_checkable
class Demanding(Protocol):
    """A reduction that not every transport supports."""

    def check_transport(self, transport: Transport, device: torch.device) -> None:
        """Raise UsageError if tensors on `device` cannot be combined over `transport`. All ranks come to the same."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A reduction with state from earlier steps, on which the ranks of a group have to agree."""

    def forget(self) -> None:
        """Reset."""
        ...


def check_goes_over(transport: Transport, reduction: Reduction, device: torch.device) -> None:
    """Refuse a reduction that `transport` cannot carry out, before a backward needs it."""
    if isinstance(reduction, Demanding):
        reduction.check_transport(transport, device)


def forget_other_ranks(reduction: Reduction) -> None:
    """The ranks of the group change: drop state that the old ranks shared."""
    if isinstance(reduction, Remembering):
        reduction.forget()
