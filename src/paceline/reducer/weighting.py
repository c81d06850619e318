"""How much a micro counts: the division by ranks, and the weights of `weight(n)`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.reducer.report import Mode
from paceline.reducer.slot import GradSlot

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


@dataclass(frozen=True, slots=True)
class Division:
    """By what the sum over all ranks is divided, and by whom."""

    by_reduction: bool  # the reduction divides by `size` itself
    size: int
    divisor: float  # what is wanted: inside join() it may be less than `size`


class Weighting:
    """What kind of micros the step has had so far, and by what their gradients are multiplied."""

    def __init__(self) -> None:
        self.current: float | None = None  # inside weight(n): n
        self.mode = self.last = Mode.NOTHING  # of this step so far, and of its last backward
        self.total = 0.0
        self.micros = 0

    def note_backward(self) -> None:
        self.last = Mode.PLAIN if self.current is None else Mode.WEIGHTED
        self.mode = self.mode.and_then(self.last)
        self.total += self.current or 0.0
        self.micros += 1

    def of_lane(self) -> float:
        """How much the lane that ends here counts: the weights of its micros, or as much as any other."""
        weight, self.total = (self.total if self.mode is Mode.WEIGHTED else 1.0), 0.0
        return weight

    def reset(self) -> None:
        self.mode, self.total, self.micros = Mode.NOTHING, 0.0, 0

    @property
    def plain(self) -> bool:
        """Whether no weight plays a part, neither in the backward that runs nor in those before it."""
        return self.current is None and self.mode in (Mode.NOTHING, Mode.PLAIN)

    def on_the_way_in(self, division: Division) -> float:
        """By what a gradient is multiplied when it goes into its bucket."""
        if self.current is not None:
            return self.current
        return 1.0 if division.by_reduction or self.mode is Mode.WEIGHTED else 1.0 / division.divisor

    def of_late(self, division: Division) -> float:
        """The same for gradients that are summed without the reduction, after it and before `on_the_way_out`."""
        weight = 1.0 if self.current is None else self.current
        if division.by_reduction:
            return weight / division.size
        return weight if self.current is not None else 1.0 / division.divisor

    @staticmethod
    def on_the_way_out(weight_of_all_ranks: float | None, division: Division) -> float:
        """By what reduced gradients are multiplied; with weights, so that they are means over all tokens."""
        if weight_of_all_ranks is None:
            return division.size / division.divisor if division.by_reduction else 1.0
        if weight_of_all_ranks == 0.0:
            return 0.0
        return (division.size if division.by_reduction else 1.0) / weight_of_all_ranks


def hold_weighted(reducer: "Reducer") -> str | None:
    """Hold what earlier micros of this step have left, so that autograd does not add to it unweighted.

    Returns the name of a parameter whose gradient did not come from a weighted micro of this step, if there is one.
    """
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            reducer.abandon()
        reducer.prepare()
        if reducer.weighting.mode is Mode.WEIGHTED and not reducer.set.is_thrown_away() and reducer.set.hold_all():
            return None
        stale = reducer.set.first_with_gradient()
        if stale is None and reducer.backwards.current is None and reducer.lanes is None:
            reducer.set.drop_gradients()
            reducer.reset()  # what an earlier micro has left was thrown away by zero_grad()
        return stale


def resume_step(reducer: "Reducer") -> None:
    """A backward begins after other micros of the step. What zero_grad() has thrown away of them counts no more, and
    what is left of weighted ones is held, since autograd would add to it unweighted."""
    if reducer.lanes is not None and not reducer.lanes.backwards:
        return  # a lane begins with empty gradients
    weighted = reducer.weighting.mode is not Mode.PLAIN
    if reducer.set.is_empty() or (weighted and reducer.set.is_thrown_away()):
        reducer.set.drop_gradients()
        for slot in reducer.set.slots:
            slot.clear() if reducer.lanes is None else slot.clear_backward()  # earlier lanes have used what they have
        reducer.weighting.reset()
    elif reducer.weighting.current is not None:
        if reducer.set.has_foreign():
            raise UsageError(
                "between two microbatches inside weight() a gradient was replaced, so it cannot be told how much it "
                "counts; change gradients in place there, or after the last backward of the step"
            )
        reducer.set.hold_all()


def check_unweighted(slot: GradSlot) -> None:
    """A backward begins with the gradient of a parameter, and not in the replica's forward, where it could be seen."""
    if slot.attached():
        raise UsageError(
            f"inside weight() a backward has added to the gradient of {slot.meta.name} before it came to an output of "
            f"the replica, so earlier microbatches and this one cannot be told apart; call the replica itself there, "
            f"and use its parameters only in it"
        )
