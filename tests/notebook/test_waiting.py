"""Sentences about who waits for whom."""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytest

from paceline.collectives.group import Group
from paceline.collectives.local import LocalTransport
from paceline.notebook.rank.rank_requests import _waits_in as waits_in
from paceline.notebook.rank_kernels.waiting import describe_waits


def at(line: int | None, source: str = "", waits_in: str | None = None) -> Mapping[str, Any]:
    return {"status": "ok", "line": line, "source": source, "waits_in": waits_in}


REDUCE = at(3, "dist.all_reduce(x)", "all_reduce")


@pytest.mark.parametrize(
    ("positions", "idle", "silent", "sentence"),
    [
        ({0: REDUCE}, [1], [], "rank 0 waits in all_reduce (line 3) for rank 1, which is idle"),
        ({0: REDUCE, 1: REDUCE}, [2, 3], [], "ranks 0-1 wait in all_reduce (line 3) for ranks 2-3, which are idle"),
        (
            {0: REDUCE, 1: at(7, "time.sleep(100)")},
            [],
            [],
            "rank 0 waits in all_reduce (line 3) for rank 1, which is at line 7: time.sleep(100)",
        ),
        (
            {0: REDUCE, 1: at(7, "f()"), 2: at(7, "f()"), 3: at(None)},
            [4],
            [],
            (
                "rank 0 waits in all_reduce (line 3) for rank 4, which is idle, "
                "and for ranks 1-2, which are at line 7: f(), "
                "and for rank 3, which is busy outside the cell's lines"
            ),
        ),
        ({0: REDUCE}, [], [1], "rank 0 waits in all_reduce (line 3) for rank 1, which does not answer"),
        (
            {0: REDUCE, 1: at(5, "", "broadcast")},
            [],
            [],
            "ranks wait for each other: rank 0 waits in all_reduce (line 3) and rank 1 waits in broadcast (line 5)",
        ),
        (
            {0: REDUCE, 1: at(5, "", "broadcast")},
            [2],
            [],
            "rank 0 waits in all_reduce (line 3) and rank 1 waits in broadcast (line 5) for rank 2, which is idle",
        ),
        (
            {0: at(None, "", "bucket 2 of backward 17"), 1: at(1, "y" * 200)},
            [],
            [],
            f"rank 0 waits in bucket 2 of backward 17 for rank 1, which is at line 1: {'y' * 59}…",
        ),
        (
            dict.fromkeys(range(63), REDUCE),
            [63],
            [],
            "ranks 0-62 wait in all_reduce (line 3) for rank 63, which is idle",
        ),
    ],
)
def test_sentences(positions: dict[int, Mapping[str, Any]], idle: list[int], silent: list[int], sentence: str) -> None:
    assert describe_waits(positions, idle, 10.2, silent=silent) == f"after 10 s, {sentence}"


def test_nobody_waits() -> None:
    assert describe_waits({0: at(3, "work()"), 1: at(4, "work()")}, [], 10.0) is None
    assert describe_waits({0: at(3, "work()")}, [1], 100.0) is None
    assert describe_waits({}, [0, 1], 3.0) is None


def test_all_in_one_call_is_told_only_when_it_takes_long() -> None:
    assert describe_waits({0: REDUCE, 1: REDUCE}, [], 10.0) is None
    expected = "after 30 s, all ranks are in the same call: ranks 0-1 wait in all_reduce (line 3)"
    assert describe_waits({0: REDUCE, 1: REDUCE}, [], 30.0) == expected


def test_a_sentence_about_many_places_stays_short() -> None:
    positions = {rank: at(rank, f"step_{rank}()") for rank in range(1, 64)}
    sentence = describe_waits({0: REDUCE, **positions}, [], 10.0)
    assert sentence is not None
    assert len(sentence) < 400
    assert sentence.endswith("and for 60 ranks elsewhere")


def test_an_answer_that_failed_says_nothing() -> None:
    assert describe_waits({0: {"status": "error", "ename": "KeyError", "evalue": "x"}}, [], 10.0) is None


class Caught:
    """A collective that is complete once somebody has waited for it, and notes the frames that did."""

    def __init__(self) -> None:
        self.frames: list[FrameType] = []

    def done(self) -> bool:
        return bool(self.frames)

    def wait(self, seconds: float) -> bool:
        frame = sys._getframe()
        while frame is not None:
            self.frames.append(frame)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return True


def test_a_wait_inside_paceline_is_named_by_what_it_waits_for() -> None:
    work = Caught()
    Group(LocalTransport()).wait(work, "bucket 2 of backward 17")
    assert waits_in(work.frames, None) == "bucket 2 of backward 17"
