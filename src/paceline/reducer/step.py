"""The current optimizer step on this rank: its part of the batch, the factors of its gradients, and its state."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.collectives.reduction import LaneBlock
from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import Abort, Mode, StepReport, StepRole
from paceline.reducer.unreduced import forget_thrown_away, is_nonzero

if TYPE_CHECKING:
    from paceline.reducer.autograd import Backward
    from paceline.reducer.reducer import Reducer


@dataclass(frozen=True, slots=True)
class Division:
    """The divisor of the sum over all ranks, and where the division is done."""

    by_reduction: bool  # the reduction divides by `size` itself
    size: int
    divisor: float  # the requested divisor: inside join() it may be less than `size`


class Weighting:
    """The kind of the step's microbatches so far, and the factors of their gradients."""

    def __init__(self) -> None:
        self.current: float | None = None  # inside weight(n): n
        self.mode = self.last = Mode.NOTHING  # of this step so far, and of its last backward
        self.total = 0.0
        self.microbatches = 0

    def note_backward(self) -> None:
        self.last = Mode.PLAIN if self.current is None else Mode.WEIGHTED
        self.mode = self.mode.and_then(self.last)
        self.total += self.current or 0.0
        self.microbatches += 1

    def of_lane(self) -> float:
        """The weight of the lane that ends here: those of its microbatches, or the default."""
        weight, self.total = (self.total if self.mode is Mode.WEIGHTED else 1.0), 0.0
        return weight

    def reset(self) -> None:
        self.mode, self.total, self.microbatches = Mode.NOTHING, 0.0, 0

    @property
    def plain(self) -> bool:
        """Whether neither the current backward nor an earlier one of the step has a weight."""
        return self.current is None and self.mode in (Mode.NOTHING, Mode.PLAIN)

    def scale_in(self, division: Division) -> float:
        """The factor of a gradient that enters its bucket."""
        if self.current is not None:
            return self.current
        return 1.0 if division.by_reduction or self.mode is Mode.WEIGHTED else 1.0 / division.divisor

    @staticmethod
    def scale_out(weight_of_all_ranks: float | None, division: Division) -> float:
        """The factor of reduced gradients; with weights, it makes them means over all tokens."""
        if weight_of_all_ranks is None:
            return division.size / division.divisor if division.by_reduction else 1.0
        if weight_of_all_ranks == 0.0:
            return 0.0
        return (division.size if division.by_reduction else 1.0) / weight_of_all_ranks


class StepState:
    """Kept by the reducer, read by the step guard and by `sync_gradients()`."""

    def __init__(self) -> None:
        self.reductions_since_step = 0
        self.forwards_pending = 0  # training forwards, to be reduced, since the last reduction or step
        self.window_open = False  # something ran that was not reduced yet
        self.local_steps = 0  # no_sync() blocks that are open: inside them a step on local gradients is intended
        self.has_gradients = False  # of the last reduction, or of the step of lanes that runs, for an optimizer to use
        self.commits = 0  # updates on reduced gradients that were completed: equal on ranks at the same point
        self._reduced = 0  # reductions ever
        self._updated_at: dict[int, int] = {}  # by optimizer, the reduction of its last update
        self._updating: set[int] = set()  # optimizers that are inside their update
        self._diverged = False  # an update was made that the other ranks did not make

    def reduced(self, *, usable: bool = True) -> None:
        self.reductions_since_step += 1
        self._reduced += 1
        self.has_gradients = usable

    def discarded(self) -> None:
        """There are no gradients, until the next reduction."""
        self.has_gradients = False

    @property
    def whole(self) -> bool:
        """Whether all parameters and optimizer states are those after a complete update on reduced gradients."""
        return not self._updating and not self._diverged

    def begin_update(self, optimizer: int) -> None:
        self._updating.add(optimizer)

    def end_update(self, optimizer: int) -> None:
        """The mark of a committed step: set here, after the update, by this rank alone."""
        self._updating.discard(optimizer)
        if self._updated_at.get(optimizer, 0) == self._reduced:
            self._diverged = True
        else:
            self._updated_at[optimizer] = self._reduced
            self.commits += 1

    def took(self, commits: int) -> None:
        """This rank has received the state of a rank with that many updates."""
        self.commits, self._diverged = commits, False
        self._updating.clear()
        self._updated_at.clear()
        self._reduced = 0

    def stepped(self) -> None:
        """An optimizer has stepped on these gradients."""
        self.reductions_since_step = self.forwards_pending = 0

    def closed(self) -> None:
        """A reduction has ended, with or without an error."""
        self.forwards_pending = 0
        self.window_open = False

    def waited_for(self) -> bool:
        """Whether the others wait for a reduction that this rank has not begun."""
        return self.forwards_pending > 0 and self.reductions_since_step == 0

    def others_wait(self, slots: Sequence[GradSlot]) -> bool:
        """Whether the loss of a training forward touched no parameter here, so that the others still wait."""
        return self.waited_for() and not any(not slot.dirty and is_nonzero(slot.grad) for slot in slots)

    def unreduced(self, slots: Sequence[GradSlot], params: Container[int], *, syncs: bool) -> list[str]:
        """Names of parameters, of those with these ids, whose gradients were not reduced since they were added to."""
        by_hand = syncs and self.waited_for()  # then no gradient of this step came through a backward
        return [
            slot.meta.name
            for slot in slots
            if (slot.dirty or (by_hand and not slot.attached()))
            and id(slot.param) in params
            and (slot.held or is_nonzero(slot.grad))
        ]


class RankBatch:
    """This rank's part of the global batch, one of as many as there are ranks, in one or more microbatches.

    `LaneBatch` has the same interface, for a global batch that is cut into lanes.
    """

    lanes = None
    has_lanes = False
    last = True  # the backward that reduces, reduces everything
    holds = False  # nothing beside the buckets
    resumes = True  # what earlier microbatches have left
    step = weight_columns = 0

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer

    @property
    def count(self) -> int:
        """The number of parts in the mean."""
        return self._reducer.transport.size

    @property
    def microbatches(self) -> int:
        return self._reducer.weighting.microbatches

    def counts(self, role: StepRole) -> bool:
        """Whether it matters which parameters took part here."""
        return role is StepRole.FULL

    def shape_digest(self) -> int:
        return 0

    def lane_weights(self) -> tuple[float, ...]:
        return ()

    def blocks(self, bucket: int, flat: torch.Tensor) -> Sequence[LaneBlock]:
        return ()

    def check(self, rows: Sequence[StepReport]) -> None:
        """All ranks have reported. Batch sizes are not checked: they only count through weight()."""

    def begin_backward(self) -> None:
        """The first gradient of a backward has arrived."""
        if self._reducer.weighting.microbatches:
            forget_thrown_away(self._reducer.bucket_set)

    def begin_untouched(self, backward: "Backward") -> None:
        """A backward that is to be reduced has produced no gradient."""
        self._reducer.begin_reduction()

    def begin_reduction(self) -> None:
        schedule = self._reducer.schedule
        if schedule.observer is not None:
            schedule.observer.begin(schedule.reductions_begun)

    def end_backward(self) -> bool:
        """A backward that is to be reduced is over. Returns whether to reduce now."""
        return True

    def abandon(self, backward: "Backward", why: Abort) -> bool:
        """A backward has failed. Returns True if nothing else has to be done."""
        return False

    def reset(self, *, memory_lost: bool) -> None:
        """The reduction has ended or failed. `memory_lost`: it was interrupted and the buckets were reallocated."""

    def memory_moved(self) -> None:
        """The buckets were reallocated."""

    def follow_group(self) -> None:
        """The group has moved to other ranks."""

    def check_update(self) -> None:
        """An optimizer is about to step."""
