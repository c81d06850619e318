"""What the current optimizer step has had so far: forwards, reductions, and what was left unreduced."""

from collections.abc import Container, Sequence

from paceline.reducer.slot import GradSlot, is_something


class StepLedger:
    """Kept by the reducer, read by the step guard and by `sync_gradients()`."""

    def __init__(self) -> None:
        self.reductions = 0  # since the last step
        self.forwards_pending = 0  # training forwards, to be reduced, since the last reduction or step
        self.window_open = False  # something ran that was not reduced yet
        self.local_steps = 0  # no_sync() blocks that are open: inside them a step on local gradients is meant
        self.commits = 0  # updates on reduced gradients that were completed: equal on ranks that are at the same place
        self._reduced = 0  # reductions ever
        self._updated_at: dict[int, int] = {}  # by optimizer, at which of them it has made its last update
        self._updating: set[int] = set()  # optimizers that are inside their update
        self._apart = False  # an update was made that the other ranks did not make

    def reduced(self) -> None:
        self.reductions += 1
        self._reduced += 1

    @property
    def whole(self) -> bool:
        """Whether parameters and optimizer state are what an update on reduced gradients has left, all of them."""
        return not self._updating and not self._apart

    def begin_update(self, optimizer: int) -> None:
        self._updating.add(optimizer)

    def end_update(self, optimizer: int) -> None:
        """The mark of a committed step: set here, after the update, by this rank alone."""
        self._updating.discard(optimizer)
        if self._updated_at.get(optimizer, 0) == self._reduced:
            self._apart = True
        else:
            self._updated_at[optimizer] = self._reduced
            self.commits += 1

    def took(self, commits: int) -> None:
        """This rank has the whole state of one that had made so many updates."""
        self.commits, self._apart = commits, False
        self._updating.clear()
        self._updated_at.clear()
        self._reduced = 0

    def stepped(self) -> None:
        """An optimizer has stepped on these gradients."""
        self.reductions = self.forwards_pending = 0

    def closed(self) -> None:
        """A reduction is over, well or not."""
        self.forwards_pending = 0
        self.window_open = False

    def waited_for(self) -> bool:
        """Whether the others wait for a reduction that this rank has not begun."""
        return self.forwards_pending > 0 and self.reductions == 0

    def others_wait(self, slots: Sequence[GradSlot]) -> bool:
        """Whether the loss of a training forward touched no parameter here, so that the others still wait."""
        return self.waited_for() and not any(not slot.dirty and is_something(slot.param.grad) for slot in slots)

    def unreduced(self, slots: Sequence[GradSlot], params: Container[int], *, syncs: bool) -> list[str]:
        """Names of parameters, of those with these ids, whose gradients were not reduced since they were added to."""
        by_hand = syncs and self.waited_for()  # then no gradient of this step came through a backward
        return [
            slot.meta.name
            for slot in slots
            if (slot.dirty or (by_hand and not slot.attached()))
            and id(slot.param) in params
            and (slot.held or is_something(slot.param.grad))
        ]
