"""What is known before planning: what a reduction costs, and when gradients become ready."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.layout import ParamMeta


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one reduction of n bytes: alpha_s + beta_s_per_byte · n."""

    alpha_s: float
    beta_s_per_byte: float
    inline: bool = False  # the computing thread itself does the work, between gradients

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.alpha_s, self.beta_s_per_byte)):
            raise UsageError(
                f"expected a finite time of zero or more per reduction and per byte, got alpha_s={self.alpha_s}, "
                f"beta_s_per_byte={self.beta_s_per_byte}; measure again, or see fit_cost()"
            )

    def of(self, nbytes: int) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def slower(self, factor: float) -> "Cost":
        """The cost of reductions that take `factor` times as long."""
        return Cost(self.alpha_s * factor, self.beta_s_per_byte * factor, self.inline)


def fit_cost(samples: Iterable[tuple[int, float]], *, inline: bool = False) -> Cost:
    """The line through (bytes, seconds) that was measured, of two sizes or more.

    Only the fastest sample of each size counts, because disturbances and late peers only add time. Errors count
    relative to the time, else the largest size alone would decide about α.
    """
    fastest: dict[int, float] = {}
    for nbytes, seconds in samples:
        if not (nbytes >= 0 and math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"expected samples of bytes and seconds of zero or more, got ({nbytes}, {seconds})")
        fastest[nbytes] = min(fastest.get(nbytes, math.inf), max(seconds, 1e-9))
    if len(fastest) < 2:
        raise UsageError(f"expected samples of two sizes or more, got {sorted(fastest)} bytes; measure another size")
    rows = [(1.0 / seconds, nbytes / seconds) for nbytes, seconds in fastest.items()]  # α·u + β·v should be 1
    uu, uv, vv = (sum(row[a] * row[b] for row in rows) for a, b in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[a] for row in rows) for a in (0, 1))
    determinant = uu * vv - uv * uv
    alpha, beta = ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant) if determinant > 0 else (0.0, -1.0)
    if beta < 0:
        alpha, beta = u / uu, 0.0
    elif alpha < 0:
        alpha, beta = 0.0, v / vv
    return Cost(alpha, beta, inline)


@dataclass(frozen=True, slots=True)
class Ready:
    """One gradient: its size, and when it was ready, in seconds since the start of backward."""

    param: int
    nbytes: int
    ready_s: float
    kind: Hashable | None = 0  # gradients of one kind may share a bucket; None shares with nobody (sparse)


@dataclass(frozen=True, slots=True)
class ReadyCurve:
    """When the gradients became ready, earliest first, and when backward ended.

    A parameter that took no part is ready when backward ends.
    """

    gradients: tuple[Ready, ...]
    backward_end_s: float

    @classmethod
    def of(
        cls, params: Sequence[ParamMeta], order: Sequence[int], ready_s: Mapping[int, float], backward_end_s: float
    ) -> "ReadyCurve":
        """The curve of `params`, whose gradients came in `order`. Those without a time took no part."""
        gradients = (
            Ready(param, params[param].nbytes, ready_s.get(param, backward_end_s), params[param].kind)
            for param in order
        )
        return cls(tuple(gradients), backward_end_s)

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)
