"""A step is a transaction: this rank has the state of step n, of step n + 1, or of none.

            begin_attempt            begin_update            end_update
    WHOLE(n) ------------> ATTEMPTING ------------> UPDATING ----------> WHOLE(n + 1)
        ^                      | drop                   | drop
        +----------------------+                        v
        ^---------------- take(step) ----------------- TORN

The mark of a committed step is set after the update, by this rank alone: the sums used in the update were complete,
so they have equal bits on all ranks, and one rank at n + 1 makes n + 1 valid.
"""

from enum import Enum, auto

from paceline.errors import IllegalMove


class StepMark(Enum):
    """The state of this rank within a step."""

    NEW = auto()  # no trained state: a rank that has just started
    WHOLE = auto()  # the state after the last update
    ATTEMPTING = auto()  # the same; forward, backward and reductions may be under way
    UPDATING = auto()  # parts of the state are of this step and parts of the next
    TORN = auto()  # and that cannot be undone


class Transaction:
    """The state of one rank, and its allowed transitions."""

    def __init__(self) -> None:
        self.step = 0  # updates that were committed
        self.mark = StepMark.NEW

    @property
    def whole(self) -> bool:
        """Whether others could continue from the state of this rank."""
        return self.mark in (StepMark.WHOLE, StepMark.ATTEMPTING)

    def begin_attempt(self) -> None:
        if self.mark is StepMark.ATTEMPTING:
            raise IllegalMove(
                f"attempt() was called inside an attempt of step {self.step}; end one attempt before the next"
            )
        self._move({StepMark.WHOLE}, StepMark.ATTEMPTING, "attempt()")

    def begin_update(self) -> None:
        if self.mark is StepMark.WHOLE:
            raise IllegalMove(
                f"commit() was called outside an attempt, or twice in one (step {self.step} is the next): write "
                f"`with run.attempt():` around the step, with one `with run.commit():` in it around the update"
            )
        self._move({StepMark.ATTEMPTING}, StepMark.UPDATING, "commit()")

    def end_update(self) -> None:
        self._move({StepMark.UPDATING}, StepMark.WHOLE, "the end of commit()")
        self.step += 1

    def end_attempt(self) -> None:
        """The attempt has ended without an error, with an update or without one."""
        self._move({StepMark.ATTEMPTING, StepMark.WHOLE}, StepMark.WHOLE, "the end of attempt()")

    def drop(self) -> None:
        """The attempt has failed, and its changes outside the update were undone."""
        left = StepMark.TORN if self.mark in (StepMark.UPDATING, StepMark.TORN) else StepMark.WHOLE
        self._move(set(StepMark) - {StepMark.NEW}, left, "the end of a failed attempt")

    def tear(self) -> None:
        """All state of this rank is about to be replaced."""
        self._move({StepMark.NEW, StepMark.WHOLE, StepMark.TORN}, StepMark.TORN, "replacing the state")

    def take(self, step: int) -> None:
        """This rank has the whole state of a rank, or of a checkpoint, that had committed `step` steps."""
        self._move({StepMark.NEW, StepMark.WHOLE, StepMark.TORN}, StepMark.WHOLE, "taking the state of another rank")
        self.step = step

    def _move(self, allowed: set[StepMark], to: StepMark, what: str) -> None:
        if self.mark not in allowed:
            expected = " or ".join(mark.name.lower() for mark in StepMark if mark in allowed)
            raise IllegalMove(f"{what} in step {self.step}: expected {expected}, got {self.mark.name.lower()}")
        self.mark = to
