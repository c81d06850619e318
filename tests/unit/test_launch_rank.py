"""What of a rank's standard error is shown at once, and what is held back until it is known how the rank ends."""

from pathlib import Path

import pytest

from paceline.launch.failure import End
from paceline.launch.rank import HOLD_S, PAUSE_S, Rank
from paceline.launch.tracebacks import HEADER

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 1, in <module>
  |     f()
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: no
    +---------------- 2 ----------------
    | KeyError: 1
    +------------------------------------
"""
TRACE = f'{HEADER}\n  File "train.py", line 1, in <module>\n    f()\nValueError: no\n'


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(0, 0, tmp_path / "rank_0.log")


def test_plain_lines_are_shown_at_once(rank: Rank) -> None:
    assert rank.note_err(b"one\ntwo\n", 0.0) == ["one", "two"]


def test_the_traceback_of_a_dying_rank_is_never_shown(rank: Rank) -> None:
    assert rank.note_err(b"before\n" + TRACE.encode(), 0.0) == ["before"]
    assert rank.note_err(b"[W1116 torch] group was not destroyed\n", PAUSE_S * 4) == []
    rank.end = End(0, 2.0, code=1)
    assert rank.release(3.0) == []
    assert "ValueError: no" in rank.tail()
    assert rank.cried_at == 0.0


@pytest.mark.parametrize(("trace", "cut"), [(trace, cut) for trace in (TRACE, GROUP) for cut in range(1, 99, 9)])
def test_a_traceback_may_come_slowly(rank: Rank, trace: str, cut: int) -> None:
    assert rank.note_err(trace[:cut].encode(), 1.0) == []
    assert rank.note_err(trace[cut:].encode(), 1.0 + PAUSE_S * 2) == []
    rank.end = End(0, 2.0, code=1)
    assert rank.release(3.0) == []


def test_stacks_of_a_fatal_error_may_come_slowly(rank: Rank) -> None:
    for number, text in enumerate(("Fatal Python error: Aborted", "", "Current thread 0x1:", "  File x", "Extension")):
        assert rank.note_err(f"{text}\n".encode(), number * PAUSE_S * 2) == []


@pytest.mark.parametrize("trace", [TRACE, GROUP])
def test_a_rank_that_goes_on_has_caught_it(rank: Rank, trace: str) -> None:
    assert rank.note_err(trace.encode(), 0.0) == []
    assert rank.note_err(b"going on\n", PAUSE_S * 2) == [*trace.splitlines(), "going on"]
    assert rank.cried_at is None
    assert rank.note_err(b"and on\n", PAUSE_S * 3) == ["and on"]


def test_a_rank_that_lives_long_has_caught_it(rank: Rank) -> None:
    assert rank.note_err(TRACE.encode(), 0.0) == []
    assert rank.release(HOLD_S / 2) == []
    assert rank.release(HOLD_S * 2) == TRACE.splitlines()


def test_a_rank_that_ends_well_has_caught_it(rank: Rank) -> None:
    rank.note_err(TRACE.encode(), 0.0)
    rank.end = End(0, 2.0)
    assert rank.release(0.1) == TRACE.splitlines()
