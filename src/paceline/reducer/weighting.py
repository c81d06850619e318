"""How much a micro counts: the division by ranks, and the weights of `weight(n)`."""

from paceline.reducer.agreement import Mode


class Weighting:
    """What kind of micros the step has had so far, and by what their gradients are multiplied."""

    def __init__(self) -> None:
        self.current: float | None = None  # inside weight(n): n
        self.mode = Mode.NOTHING
        self.total = 0.0
        self.micros = 0

    def note_backward(self) -> None:
        self.mode = self.mode.and_then(Mode.PLAIN if self.current is None else Mode.WEIGHTED)
        self.total += self.current or 0.0
        self.micros += 1

    def reset(self) -> None:
        self.mode, self.total, self.micros = Mode.NOTHING, 0.0, 0

    def on_the_way_in(self, *, divides: bool, divisor: float) -> float:
        """By what a gradient is multiplied when it goes into its bucket; `divides` if the reduction divides itself."""
        if self.current is not None:
            return self.current
        return 1.0 if divides or self.mode is Mode.WEIGHTED else 1.0 / divisor

    def of_late(self, *, divides: bool, divisor: float) -> float:
        """The same for gradients that are summed without the reduction, after it."""
        if self.current is None:
            return 1.0 / divisor
        return self.current / divisor if divides else self.current

    @staticmethod
    def on_the_way_out(total_of_all_ranks: float, *, divides: bool, divisor: float) -> float:
        """By what weighted sums are multiplied, so that they are means over all tokens."""
        if total_of_all_ranks == 0.0:
            return 0.0
        return (divisor if divides else 1.0) / total_of_all_ranks
