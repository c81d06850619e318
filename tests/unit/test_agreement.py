"""The words that ranks tell each other, and what follows from them."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BackwardAborted, CollectiveMismatch
from paceline.reducer.agreement import WORD_COUNT, Mode, Vote, Words, aborted_error, decode_all

words = st.builds(
    Words,
    reduction=st.integers(0, 2**62),
    unused=st.integers(0, 2**31),
    late=st.integers(0, 2**31),
    mode=st.sampled_from(Mode),
    weight=st.floats(allow_nan=False),
    aborted=st.booleans(),
    skipped=st.booleans(),
    votes=st.sampled_from([Vote.NOTHING, Vote.STOP, Vote.SAVE | Vote.EXHAUSTED]),
    calls=st.integers(-(2**63), 2**63 - 1),
    lane_weights=st.lists(st.floats(allow_nan=False), max_size=9).map(tuple),
)


def gathered(*rows: Words) -> torch.Tensor:
    return torch.stack([row.encode() for row in rows])


def plain(reduction: int = 7, mode: Mode = Mode.PLAIN, *, weight: float = 0.0, aborted: bool = False) -> Words:
    return Words(reduction, unused=0, late=0, mode=mode, weight=weight, aborted=aborted)


@given(words)
def test_words_survive_the_wire(row: Words) -> None:
    encoded = row.encode()
    assert encoded.shape == (WORD_COUNT + len(row.lane_weights),)
    assert encoded.dtype is torch.int64
    assert Words.decode(encoded.tolist()) == row


def test_a_weight_that_is_no_number_survives_too() -> None:
    assert math.isnan(Words.decode(plain(weight=math.nan).encode().tolist()).weight)


def test_equal_words_are_given_in_rank_order() -> None:
    rows = [plain(weight=float(rank), mode=Mode.WEIGHTED) for rank in range(3)]
    assert decode_all(gathered(*rows)) == rows


def test_a_rank_that_ran_nothing_goes_with_either_kind() -> None:
    for mode in (Mode.PLAIN, Mode.WEIGHTED):
        decode_all(gathered(plain(mode=mode), plain(mode=Mode.NOTHING)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([plain(7), plain(8)], "different steps: rank 0: 7, rank 1: 8"),
        ([plain(mode=Mode.PLAIN), plain(mode=Mode.WEIGHTED)], "rank 0: PLAIN, rank 1: WEIGHTED"),
        ([plain(mode=Mode.MIXED), plain(mode=Mode.MIXED)], "rank 0: MIXED, rank 1: MIXED"),
        ([plain(mode=Mode.MIXED), plain(mode=Mode.NOTHING)], "inside weight"),
    ],
)
def test_words_that_cannot_belong_together_are_refused(rows: list[Words], message: str) -> None:
    with pytest.raises(CollectiveMismatch, match=re.escape(message)):
        decode_all(gathered(*rows))


def test_an_aborted_rank_is_reported_before_anything_else() -> None:
    rows = [plain(7), plain(9, aborted=True), plain(7, mode=Mode.MIXED, aborted=True)]
    assert decode_all(gathered(*rows)) == rows
    error = aborted_error(rows)
    assert isinstance(error, BackwardAborted)
    assert error.ranks == (1, 2)
    assert "exception on rank 1, 2" in str(error)


@pytest.mark.parametrize(
    ("first", "then", "together"),
    [
        (Mode.NOTHING, Mode.PLAIN, Mode.PLAIN),
        (Mode.NOTHING, Mode.WEIGHTED, Mode.WEIGHTED),
        (Mode.PLAIN, Mode.PLAIN, Mode.PLAIN),
        (Mode.PLAIN, Mode.WEIGHTED, Mode.MIXED),
        (Mode.WEIGHTED, Mode.PLAIN, Mode.MIXED),
        (Mode.MIXED, Mode.PLAIN, Mode.MIXED),
    ],
)
def test_kinds_of_backwards_add_up(first: Mode, then: Mode, together: Mode) -> None:
    assert first.and_then(then) is together
