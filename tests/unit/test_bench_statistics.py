"""Medians and ratios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hooks_cost import robust_line
from paceline.bench.statistics import percentile, ratio_of_medians

SECONDS = st.floats(1e-6, 10.0)


def test_percentiles_interpolate() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([0.0, 10.0], 10) == pytest.approx(1.0)
    assert percentile([7.0], 90) == 7.0


@given(st.lists(SECONDS, min_size=1, max_size=20))
def test_percentiles_stay_within_the_samples_and_in_order(samples: list[float]) -> None:
    low, middle, high = (percentile(samples, percent) for percent in (10, 50, 90))
    assert min(samples) <= low <= middle <= high <= max(samples)


def test_a_ratio_is_that_of_the_medians() -> None:
    found = ratio_of_medians([[2.0, 2.0], [2.0]], [[1.0], [1.0, 1.0]])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_noise_that_hits_both_sides_of_a_round_widens_nothing() -> None:
    ours = [[1.0], [10.0], [100.0], [1.0], [10.0]]
    theirs = [[2.0], [20.0], [200.0], [2.0], [20.0]]
    found = ratio_of_medians(ours, theirs)
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


def test_noise_of_one_side_widens_the_interval() -> None:
    found = ratio_of_medians([[1.0], [2.0], [3.0], [4.0], [5.0]], [[1.0]] * 5)
    assert found.low < found.value < found.high


def test_the_same_samples_give_the_same_interval() -> None:
    ours, theirs = [[1.0, 1.2], [0.9, 1.4]], [[1.1, 1.0], [1.3, 0.8]]
    assert ratio_of_medians(ours, theirs) == ratio_of_medians(ours, theirs)


def test_a_line_through_points_with_one_outlier() -> None:
    points = [(float(x), 3.0 + 2.0 * x) for x in range(9)]
    points[4] = (4.0, 1000.0)
    fixed, slope = robust_line(points)
    assert slope == pytest.approx(2.0)
    assert fixed == pytest.approx(3.0)
