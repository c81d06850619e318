"""Overlap, read from stamps."""

import pytest

from paceline.observe.overlap import read_overlap
from paceline.trace import Moment, Stamp


def stamps(*moments: tuple[int, Moment, int]) -> list[Stamp]:
    return [Stamp(ns, moment, 5, bucket) for ns, moment, bucket in moments]


def test_a_bucket_that_ends_before_backward_is_hidden() -> None:
    found = read_overlap(
        stamps(
            (0, Moment.BACKWARD_BEGIN, -1),
            (10, Moment.LAUNCHED, 0),
            (30, Moment.COMPLETED, 0),
            (50, Moment.LAUNCHED, 1),
            (60, Moment.BACKWARD_END, -1),
            (80, Moment.COMPLETED, 1),
            (80, Moment.WAIT_LEFT, 1),
        )
    )
    assert found["communication_s"] == pytest.approx(50e-9)
    assert found["exposed_communication_s"] == pytest.approx(20e-9)
    assert found["overlap"] == pytest.approx(0.6)


def test_buckets_in_flight_at_the_same_time_count_once() -> None:
    found = read_overlap(
        stamps(
            (0, Moment.LAUNCHED, 0),
            (10, Moment.LAUNCHED, 1),
            (40, Moment.COMPLETED, 0),
            (60, Moment.COMPLETED, 1),
            (60, Moment.BACKWARD_END, -1),
        )
    )
    assert found["communication_s"] == pytest.approx(60e-9)
    assert found["overlap"] == 1.0


def test_only_the_last_backward_counts() -> None:
    old = [Stamp(1, Moment.LAUNCHED, 4, 0), Stamp(2, Moment.COMPLETED, 4, 0), Stamp(1, Moment.BACKWARD_END, 4, -1)]
    new = stamps((10, Moment.BACKWARD_END, -1), (10, Moment.LAUNCHED, 0), (20, Moment.COMPLETED, 0))
    assert read_overlap(old + new)["overlap"] == 0.0


def test_nothing_to_read() -> None:
    assert read_overlap([]) == {}
    assert read_overlap(stamps((1, Moment.BACKWARD_END, -1))) == {}
