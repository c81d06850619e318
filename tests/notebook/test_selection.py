"""What people write for ranks, and what they are told when it cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.notebook.rank_selection import parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("[0]", (0,)),
        ("[0,2]", (0, 2)),
        ("[0-2]", (0, 1, 2)),
        ("0:2", (0, 1)),
        ("[0:2]", (0, 1)),
        ("0,2", (0, 2)),
        ("0 2", (0, 2)),
        ("1 0", (0, 1)),
        ("(1, 3)", (1, 3)),
        ("all", (0, 1, 2, 3)),
        ("[ALL]", (0, 1, 2, 3)),
        ("*", (0, 1, 2, 3)),
        (":", (0, 1, 2, 3)),
        ("1:", (1, 2, 3)),
        (":2", (0, 1)),
        ("::2", (0, 2)),
        ("1:4:2", (1, 3)),
        ("!0", (1, 2, 3)),
        ("![0,1]", (2, 3)),
        ("! 1:3", (0, 3)),
        (" [ 0 - 1 , 3 ] ", (0, 1, 3)),
        ("[3, 1, 3, 0-1]", (0, 1, 3)),
        ("[0,]", (0,)),
        ("[0]  # the first one", (0,)),
    ],
)
def test_spellings(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("[5]", 2, "rank 5 does not exist: expected ranks of 0-1, got [5]"),
        ("1", 1, "rank 1 does not exist: expected rank 0, got 1"),
        ("[0,2,3]", 2, "rank 3 does not exist: expected ranks of 0-1, got [0,2,3]"),
        ("0:99999999999999", 2, "rank 99999999999998 does not exist: expected ranks of 0-1, got 0:99999999999999"),
        ("!7", 2, "rank 7 does not exist: expected ranks of 0-1, got !7"),
        ("0:9:4", 4, "rank 8 does not exist: expected ranks of 0-3, got 0:9:4"),
        ("0:10:3", 5, "rank 9 does not exist: expected ranks of 0-4, got 0:10:3"),
        ("!all", 2, "!all selects no rank: expected ranks of 0-1"),
        ("!0", 1, "!0 selects no rank: expected rank 0"),
        ("[2-1]", 4, "[2-1] selects no rank: expected ranks of 0-3"),
        ("1:1", 4, "1:1 selects no rank: expected ranks of 0-3"),
    ],
)
def test_ranks_that_are_not_there(text: str, size: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ranks(text, size)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "# 0", "[]", "()", "-1", "[0", "0]", "[0,,1]", ",", "one", "{r}", "[0] print(x)", "0-", "!!0", "!"),
        *("1.0", "0,!1", "0::0", "٣", "[[0]]", "0-1-2", "all,0", "9" * 5000),
    ],
)
def test_no_ranks_at_all(text: str) -> None:
    with pytest.raises(UsageError, match="^expected ranks of 0-1, written as 0, .* got "):
        parse_ranks(text, 2)


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(UsageError) as caught:
        parse_ranks("x" * 10_000, 2)
    assert len(str(caught.value)) < 250


SIZES = st.integers(1, 12)
SPACE = st.sampled_from(["", " ", "  ", "\t"])


@st.composite
def spelled(draw: st.DrawFn) -> tuple[str, int, set[int]]:
    """Some ranks of a world, written in one of the ways there are."""
    size = draw(SIZES)
    items: list[str] = []
    meant: set[int] = set()
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, size - 1))
        last = draw(st.integers(first, size - 1))
        gap = draw(SPACE)
        way = draw(st.sampled_from(["one", "range", "slice"]))
        items.append(
            {"one": f"{first}", "range": f"{first}{gap}-{gap}{last}", "slice": f"{first}{gap}:{last + 1}"}[way]
        )
        meant |= {first} if way == "one" else set(range(first, last + 1))
    text = f"{draw(SPACE)},{draw(SPACE)}".join(items)
    opens, closes = draw(st.sampled_from([("", ""), ("[", "]"), ("(", ")")]))
    return f"{opens}{draw(SPACE)}{text}{draw(SPACE)}{closes}", size, meant


@given(spelled())
def test_every_spelling_of_a_set(case: tuple[str, int, set[int]]) -> None:
    text, size, meant = case
    assert parse_ranks(text, size) == tuple(sorted(meant))
    others = set(range(size)) - meant
    if others:
        assert parse_ranks(f"!{text}", size) == tuple(sorted(others))


@given(st.text(alphabet="0123[](),-:!*al #", max_size=12), SIZES)
def test_any_text_gives_ranks_or_words(text: str, size: int) -> None:
    try:
        ranks = parse_ranks(text, size)
    except UsageError:
        return
    assert ranks and set(ranks) <= set(range(size)) and list(ranks) == sorted(set(ranks))
