"""Generators that are kept and put back, also by loops that overlap."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from paceline.randomness import Kept, put_back, seed_host


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with put_back():
        yield


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_what_is_inside_does_not_show_outside() -> None:
    seed_host(1)
    wanted = drawn(), drawn()
    seed_host(1)
    first = drawn()
    with put_back():
        seed_host(2)
        inside = drawn()
        with put_back():
            assert drawn() != inside
        assert drawn() not in wanted
    assert (first, drawn()) == wanted


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_the_end_is_the_beginning_whoever_ends_last(order: tuple[int, ...]) -> None:
    seed_host(1)
    wanted = drawn()
    seed_host(1)
    kept = []
    for number in range(3):
        kept.append(Kept())
        seed_host(10 + number)
    for number in order:
        kept[number].put_back()
    assert drawn() == wanted
    after = drawn()
    for one in kept:
        one.put_back()  # once more, which changes nothing
    assert drawn() not in (wanted, after)
