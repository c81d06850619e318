"""Medians, ratios and fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.figures import fit_two, median, percentile, ratio_of_medians, robust_line

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


@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_two_terms_are_found_again(alpha: float, beta: float) -> None:
    rows = [(u, v, alpha * u + beta * v) for u, v in [(2.0, 1e3), (4.0, 1e5), (2.0, 1e7), (6.0, 1e8)]]
    found_alpha, found_beta = fit_two(rows)
    for u, v, t in rows:
        assert found_alpha * u + found_beta * v == pytest.approx(t, rel=1e-3)


def test_neither_term_becomes_negative() -> None:
    # More bytes took less time: only messages can explain something.
    assert fit_two([(2.0, 1e3, 2.0), (2.0, 1e6, 1.0)])[1] == 0.0
    alpha, beta = fit_two([(1.0, 10.0, 1.0), (2.0, 10.0, 1.0)])
    assert alpha == 0.0
    assert beta == pytest.approx(0.1)


def test_the_median_of_an_even_number() -> None:
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
