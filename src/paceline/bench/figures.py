"""Medians, spreads and ratios."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Rounds = Sequence[Sequence[float]]  # one list of samples per turn


def percentile(samples: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest samples."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 50)


def flat(rounds: Rounds) -> list[float]:
    return [sample for turn in rounds for sample in turn]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians, and the interval that holds it in 9 of 10 resamplings of the rounds."""

    value: float
    low: float
    high: float


def ratio_of_medians(ours: Rounds, theirs: Rounds, *, resamplings: int = 400) -> Ratio:
    """Rounds are resampled whole and in pairs: what disturbed a round disturbed both sides of it."""
    count = min(len(ours), len(theirs))
    assert count, "a ratio needs at least one round of each side"
    source = random.Random(0)
    found = []
    for _ in range(resamplings):
        picks = [source.randrange(count) for _ in range(count)]
        below = median(flat([theirs[pick] for pick in picks]))
        found.append(median(flat([ours[pick] for pick in picks])) / below)
    value = median(flat(ours[:count])) / median(flat(theirs[:count]))
    return Ratio(value, percentile(found, 5), percentile(found, 95))


def robust_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y = a + b·x with the median of all pairwise slopes (Theil and Sen): one disturbed point moves it little."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x1 != x2]
    slope = median(slopes)
    return median([y - slope * x for x, y in points]), slope


def fit_two(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """α and β, neither negative, of t = α·u + β·v for rows (u, v, t): least squares of relative errors."""
    uu = uv = vv = us = vs = 0.0
    for u, v, t in rows:
        u, v = u / t, v / t
        uu, uv, vv, us, vs = uu + u * u, uv + u * v, vv + v * v, us + u, vs + v
    det = uu * vv - uv * uv
    if det > 1e-12 * uu * vv:
        alpha, beta = (us * vv - vs * uv) / det, (vs * uu - us * uv) / det
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # One of the two explains nothing; the other alone explains best.
    only_alpha, only_beta = us / uu, vs / vv
    left_alpha = sum((only_alpha * u / t - 1) ** 2 for u, _, t in rows)
    left_beta = sum((only_beta * v / t - 1) ** 2 for _, v, t in rows)
    return (only_alpha, 0.0) if left_alpha < left_beta else (0.0, only_beta)
