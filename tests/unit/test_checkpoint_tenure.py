"""Which process of a job may take its directory of checkpoints over from which. What comes of it is in
tests/procs/test_checkpoint_takeover.py.
"""

import os
import time

import pytest

from paceline.checkpoint.tenure import Tenure
from paceline.member import Member
from paceline.member_messages import NEVER, Generation, to_line
from paceline.rank_report import JOB_NAME

JOB, OTHER = "0123456789abcdef", "fedcba9876543210"
PATIENCE_S = 20.0


def signed(tenure: Tenure) -> str:
    return f"process 7 on some-host{tenure}"


@pytest.mark.parametrize(
    ("attempt", "generation", "given_up"),
    [(0, 2, True), (0, 3, False), (0, 4, False), (1, NEVER, False), (1, 0, False), (0, NEVER, True)],
)
def test_only_what_was_there_before_in_the_same_job_was_given_up(attempt: int, generation: int, given_up: bool) -> None:
    mine = Tenure(JOB, 0, 3)
    assert mine.follows(signed(Tenure(JOB, attempt, generation))) is given_up
    assert not mine.follows(signed(Tenure(OTHER, attempt, generation)))


@pytest.mark.parametrize(
    "holder", ["", "process 7 on some-host", "another process", "process 7 on h, job x, attempt 0"]
)
def test_who_has_not_said_of_which_job_it_is_was_not_given_up(holder: str) -> None:
    assert not Tenure(JOB, 9, 9).follows(holder)


def test_a_member_is_of_the_generation_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_NAME, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Tenure.own() is None  # no launcher of ours
    monkeypatch.setenv(JOB_NAME, JOB)
    assert Tenure.own() == Tenure(JOB, 2, NEVER)
    heard, said = os.pipe()
    member = Member(4, heard, lambda _: True)
    try:
        monkeypatch.setattr(Member, "_own", member)
        os.write(said, to_line(Generation(number=6, members=(4,), sources=(), step=0, fresh=True)))
        until = time.monotonic() + PATIENCE_S
        while member.generation is None and time.monotonic() < until:
            time.sleep(0.01)
        assert Tenure.own() == Tenure(JOB, 2, 6)
    finally:
        member.close()
        os.close(said)
        os.close(heard)
