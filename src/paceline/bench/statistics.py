"""Spreads, and ratios of medians."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[Sequence[float]]  # one list of samples per turn


def percentile(samples: Sequence[float], percent: float) -> float:
    """A percentile, with linear interpolation between the two nearest samples."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


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
