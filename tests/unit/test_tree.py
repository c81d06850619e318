"""Sums in one fixed order: folding aligned blocks first, as ranks with several parts do, changes no bit."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.blocks import Block, aligned_blocks, lanes_of
from paceline.collectives.tree_sum import tree_additions, tree_sum, tree_sum_of_blocks
from paceline.errors import UsageError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def parts(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that every order of additions has its own bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(50, generator=generator) * 10.0 ** torch.randint(-3, 4, (50,), generator=generator)).to(dtype)
        for _ in range(count)
    ]


def test_the_tree_is_the_balanced_one_without_its_missing_leaves() -> None:
    a, b, c, d, e, f, g = parts(7, 0)
    assert torch.equal(tree_sum([a]), a)
    assert torch.equal(tree_sum([a, b, c]), (a + b) + c)
    assert torch.equal(tree_sum([a, b, c, d]), (a + b) + (c + d))
    assert torch.equal(tree_sum([a, b, c, d, e]), ((a + b) + (c + d)) + e)
    assert torch.equal(tree_sum([a, b, c, d, e, f, g]), ((a + b) + (c + d)) + ((e + f) + g))


def test_another_order_has_other_bits() -> None:
    a, b, c, d = parts(4, 0)
    assert not torch.equal(tree_sum([a, b, c, d]), ((a + b) + c) + d)


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 8, [(0, 8)]),
        (0, 3, [(0, 2), (2, 1)]),
        (3, 3, [(3, 1), (4, 2)]),
        (6, 2, [(6, 2)]),
        (1, 6, [(1, 1), (2, 2), (4, 2), (6, 1)]),
        (5, 0, []),
    ],
)
def test_parts_in_a_row_are_few_blocks(first: int, count: int, expected: list[Block]) -> None:
    assert list(aligned_blocks(first, count)) == expected


@given(
    count=st.integers(1, 40),
    ranks=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
)
def test_whoever_adds_up_which_blocks_the_bits_are_equal(count: int, ranks: int, seed: int, dtype: torch.dtype) -> None:
    held = parts(count, seed, dtype)
    expected = tree_sum(held)
    dice = random.Random(seed)
    cuts = sorted(dice.choices(range(count + 1), k=ranks - 1))
    blocks = {}
    for start, end in pairwise([0, *cuts, count]):
        for first, width in aligned_blocks(start, end - start):
            assert first % width == 0 and start <= first and first + width <= end
            blocks[first, width] = tree_sum(held[first : first + width])
    assert torch.equal(tree_sum_of_blocks(blocks, count), expected)


@given(count=st.integers(1, 20), seed=st.integers(0, 100))
def test_additions_in_place_make_the_same_sum(count: int, seed: int) -> None:
    held = parts(count, seed)
    expected = tree_sum(held)
    for into, other in tree_additions(count):
        held[into] += held[other]
    assert torch.equal(held[0], expected)


@given(size=st.integers(1, 12), lanes=st.integers(1, 40))
def test_ranks_share_the_lanes_and_the_first_are_never_behind(size: int, lanes: int) -> None:
    owned = [lanes_of(rank, size, lanes) for rank in range(size)]
    assert [lane for own in owned for lane in own] == list(range(lanes))
    counts = [len(own) for own in owned]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == max(counts)


@given(count=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_parts_stay_as_they_are_and_the_sum_is_new(count: int, seed: int) -> None:
    held = parts(count, seed)
    before = [part.clone() for part in held]
    tree_sum(held).zero_()
    assert all(torch.equal(part, old) for part, old in zip(held, before, strict=True))


@pytest.mark.parametrize(
    "blocks", [[], [(0, 1)], [(0, 2), (2, 1)], [(0, 4), (1, 1)], [(0, 1), (1, 2), (3, 1)], [(0, 2), (0, 1), (2, 2)]]
)
def test_blocks_that_do_not_hold_each_part_once_are_refused(blocks: list[Block]) -> None:
    with pytest.raises(UsageError, match="expected .*of 4"):
        tree_sum_of_blocks(dict.fromkeys(blocks, torch.zeros(1)), 4)
