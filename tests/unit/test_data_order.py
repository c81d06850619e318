"""The order of an epoch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import Cursor, order
from paceline.data.cursor import fingerprint
from paceline.errors import UsageError
from paceline.randomness import mixed

lengths = st.integers(0, 200)
seeds = st.integers(-(2**70), 2**70)


@given(seed=seeds, epoch=st.integers(0, 9), length=lengths)
def test_an_order_is_a_permutation_that_follows_from_seed_and_epoch(seed: int, epoch: int, length: int) -> None:
    found = order(seed, epoch, length)
    assert found.dtype is torch.int64
    assert sorted(found.tolist()) == list(range(length))
    assert torch.equal(found, order(seed, epoch, length))


def test_orders_of_other_seeds_and_epochs_are_others() -> None:
    found = {tuple(order(seed, epoch, 50).tolist()) for seed in range(8) for epoch in range(8)}
    assert len(found) == 64  # torch's seed + epoch would give 15


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = order(0, 0, 20)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, order(0, 0, 20))


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert order(3, 1, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_fingerprint_tells_orders_apart() -> None:
    assert fingerprint(order(0, 0, 1000)) == fingerprint(order(0, 0, 1000))
    assert len({fingerprint(order(0, epoch, 1000)) for epoch in range(50)}) == 50
    assert fingerprint(order(0, 0, 0)) == fingerprint(torch.empty(0, dtype=torch.int64))


def test_mixed_numbers_fit_a_generator() -> None:
    assert 0 <= mixed(2**80, -5) < 2**63
    assert mixed(0, 1) != mixed(1, 0)


def test_a_cursor_behind_the_beginning_is_refused() -> None:
    with pytest.raises(UsageError, match="committed must be at least 0, got -1"):
        Cursor(0, 0, -1)
