"""Cutting output into lines, and folding equal lines of several ranks."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.run_output import RunOutput
from paceline.launch import Job
from paceline.launch.lines import BAR_EVERY_S, FOLD_S, QUIET_S, Fold, Lines, spans


def cut(*pieces: bytes, rank: int = 0) -> list[str]:
    lines = Lines(rank)
    return [line for piece in pieces for line in lines.feed(piece, 0.0)] + lines.rest()


@given(st.text(alphabet="ab\n é", max_size=60), st.lists(st.integers(0, 80), max_size=6))
def test_lines_do_not_depend_on_how_bytes_arrive(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(place for place in cuts if place < len(data))})
    pieces = [data[low:high] for low, high in pairwise(edges)]
    expected = text.split("\n")
    assert cut(*pieces) == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"10%\r", b"20%\r", b"30%\n", b"next\n"], ["30%", "next"]),
        ([b"\r 10%|#", b"\r 20%|##", b"\n"], [" 20%|##"]),
        ([b"windows\r\n", b"lines\r", b"\n"], ["windows", "lines"]),
        ([b"half"], ["half"]),
        ([b"bad \xff\xfe byte\n"], ["bad \ufffd\ufffd byte"]),
        ([b"[rank0]: Traceback\n", b"[rank1]: other\n", b"[rank0]:\n"], ["Traceback", "[rank1]: other", ""]),
    ],
)
def test_bars_and_odd_bytes(pieces: list[bytes], expected: list[str]) -> None:
    assert cut(*pieces) == expected


def test_a_long_bar_shows_its_state_now_and_then() -> None:
    lines = Lines(0)
    shown = [line for second in range(21) for line in lines.feed(f"\rat {second}".encode(), float(second))]
    assert 2 <= len(shown) <= 20 / BAR_EVERY_S
    assert shown[0] == "at 6"


def test_a_question_is_shown_when_nothing_follows() -> None:
    lines = Lines(0)
    assert lines.feed(b"name? ", 0.0) == []
    assert lines.idle(QUIET_S / 2) == []
    assert lines.idle(QUIET_S * 2) == ["name? "]
    assert lines.idle(QUIET_S * 4) == []


def test_a_line_without_end_does_not_fill_memory() -> None:
    assert sum(map(len, cut(*[b"x" * 50_000] * 4))) == 200_000
    assert len(cut(*[b"x" * 50_000] * 4)) > 1


def fold(ranks: int, *lines: tuple[int, str, float], end: float = 1e9) -> list[tuple[tuple[int, ...], str]]:
    shown: list[tuple[tuple[int, ...], str]] = []
    folding = Fold[str](lambda who, text: shown.append((who, text)), ranks)
    for rank, text, at in lines:
        folding.add(rank, text, at)
    folding.flush(end)
    return shown


def test_equal_lines_become_one() -> None:
    assert fold(3, (0, "a", 0), (2, "a", 0.01), (1, "a", 0.02), end=0.02) == [((0, 1, 2), "a")]


def test_lines_around_different_ones_still_meet() -> None:
    lines = [(rank, text, 0.01 * rank) for rank in range(3) for text in ("start", f"I am {rank}", "same", "end")]
    shown = fold(3, *lines)
    assert shown[0] == ((0, 1, 2), "start")
    assert shown[-2:] == [((0, 1, 2), "same"), ((0, 1, 2), "end")]
    assert len(shown) == 6


def test_late_lines_are_not_waited_for() -> None:
    shown: list[tuple[int, ...]] = []
    folding = Fold[str](lambda who, _: shown.append(who), 2)
    folding.add(0, "a", 0.0)
    folding.flush(FOLD_S + 0.01)
    folding.add(1, "a", FOLD_S + 0.02)
    folding.flush(1.0)
    assert shown == [(0,), (1,)]


def test_one_rank_alone_waits_for_nobody() -> None:
    assert fold(1, (0, "a", 0.0), (0, "a", 0.0), end=0.0) == [((0,), "a"), ((0,), "a")]


def test_output_and_errors_are_apart() -> None:
    shown: list[tuple[tuple[int, ...], tuple[str, int]]] = []
    folding = Fold[tuple[str, int]](lambda *line: shown.append(line), 2)
    folding.add(0, ("a", 1), 0.0)
    folding.add(1, ("a", 2), 0.0)
    folding.flush(1.0)
    assert sorted(shown) == [((0,), ("a", 1)), ((1,), ("a", 2))]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3])), max_size=60
    )
)
def test_no_line_is_lost_and_no_rank_reordered(lines: list[tuple[int, str, float]]) -> None:
    now, timed = 0.0, []
    for rank, text, later in lines:
        now += later
        timed.append((rank, text, now))
    shown = fold(4, *timed)
    for rank in range(4):
        assert [text for who, text in shown if rank in who] == [text for by, text, _ in timed if by == rank]
    assert all(len(set(who)) == len(who) for who, _ in shown)


def test_the_screen_shows_folded_lines_at_once_and_hides_what_it_was_told_to(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    job = Job(command=("x",), ranks=2, run_dir=tmp_path)
    output = RunOutput(job, [0, 2], out=out, err=err)
    for rank in (1, 0):
        output.line(rank, "same")
        output.error_line(rank, "wrong")
    assert out.getvalue() == "[0-1] same\n"
    output.close()
    assert err.getvalue() == "[0] wrong\n"


def test_much_output_does_not_wait_for_ever() -> None:
    lines = [(0, str(number), 0.0) for number in range(20_000)]
    shown: list[str] = []
    folding = Fold[str](lambda _, text: shown.append(text), 2)
    for rank, text, at in lines:
        folding.add(rank, text, at)
    assert len(shown) > 10_000


@pytest.mark.parametrize(
    ("ranks", "expected"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3], "0,2-3"), ([5, 1], "1,5")]
)
def test_spans(ranks: list[int], expected: str) -> None:
    assert spans(ranks) == expected


def test_the_prefixes_of_a_member_are_those_of_all_its_ranks() -> None:
    line = b"[rank2]: [rank0]: [rank1]: Traceback (most recent call last):\n"
    assert Lines(3, member=True).feed(line, 0.0) == ["Traceback (most recent call last):"]
    assert Lines(3).feed(line, 0.0) == [line.decode().rstrip()]
