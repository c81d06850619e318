"""What of a rank's standard error is shown at once, and what is held back until it is known how the rank ends."""

import math

import pytest

from paceline.launch.rank_slot import HOLD_S, PAUSE_S, RankErrors
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
def rank() -> RankErrors:
    return RankErrors(0)


def test_plain_lines_are_shown_at_once(rank: RankErrors) -> None:
    assert rank.feed(b"one\ntwo\n", 0.0) == ["one", "two"]


def test_the_traceback_of_a_dying_rank_is_never_shown(rank: RankErrors) -> None:
    assert rank.feed(b"before\n" + TRACE.encode(), 0.0) == ["before"]
    assert rank.feed(b"[W1116 torch] group was not destroyed\n", PAUSE_S * 4) == []
    rank.hold_s = math.inf
    assert rank.idle(3.0) == []
    assert "ValueError: no" in rank.last
    assert rank.traceback_at == 0.0


@pytest.mark.parametrize(("trace", "cut"), [(trace, cut) for trace in (TRACE, GROUP) for cut in range(1, 99, 9)])
def test_a_traceback_may_come_slowly(rank: RankErrors, trace: str, cut: int) -> None:
    assert rank.feed(trace[:cut].encode(), 1.0) == []
    assert rank.feed(trace[cut:].encode(), 1.0 + PAUSE_S * 2) == []
    rank.hold_s = math.inf
    assert rank.idle(3.0) == []


def test_stacks_of_a_fatal_error_may_come_slowly(rank: RankErrors) -> None:
    for number, text in enumerate(("Fatal Python error: Aborted", "", "Current thread 0x1:", "  File x", "Extension")):
        assert rank.feed(f"{text}\n".encode(), number * PAUSE_S * 2) == []


@pytest.mark.parametrize("trace", [TRACE, GROUP])
def test_a_rank_that_goes_on_has_caught_it(rank: RankErrors, trace: str) -> None:
    assert rank.feed(trace.encode(), 0.0) == []
    assert rank.feed(b"going on\n", PAUSE_S * 2) == [*trace.splitlines(), "going on"]
    assert rank.traceback_at is None
    assert rank.feed(b"and on\n", PAUSE_S * 3) == ["and on"]


def test_a_rank_that_lives_long_has_caught_it(rank: RankErrors) -> None:
    assert rank.feed(TRACE.encode(), 0.0) == []
    assert rank.idle(HOLD_S / 2) == []
    assert rank.idle(HOLD_S * 2) == TRACE.splitlines()


def test_a_rank_that_ends_well_has_caught_it(rank: RankErrors) -> None:
    rank.feed(TRACE.encode(), 0.0)
    rank.hold_s = 0.0
    assert rank.idle(0.1) == TRACE.splitlines()
