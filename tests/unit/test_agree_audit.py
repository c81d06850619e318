"""Whose lane is audited by whom, and who is wrong when they differ."""

import pytest

from paceline.agree.audit import Audit, audit_of, decide
from paceline.blocks import lanes_of


def test_only_every_so_many_steps_are_audited() -> None:
    assert [step for step in range(10) if audit_of(step, 4, 8, 2)] == [0, 4, 8]
    assert not any(audit_of(step, 0, 8, 2) for step in range(10))
    assert not any(audit_of(step, 1, 8, 1) for step in range(10)), "one rank has nobody to ask"


@pytest.mark.parametrize(("lanes", "size"), [(2, 2), (8, 3), (5, 4), (7, 7)])
def test_every_lane_is_computed_by_every_other_rank_in_turn(lanes: int, size: int) -> None:
    audits = [audit_of(step, 1, lanes, size) for step in range(lanes * (size - 1))]
    assert all(audit and audit.lane in lanes_of(audit.owner, size, lanes) for audit in audits)
    assert len({(audit.lane, audit.auditor) for audit in audits if audit}) == len(audits)
    assert all(audit and audit.auditor != audit.owner for audit in audits)


@pytest.mark.parametrize("size", [3, 4, 9])
def test_a_third_rank_decides(size: int) -> None:
    for auditor in range(size):
        for owner in range(size):
            if owner != auditor:
                (third,) = Audit(0, 0, owner, auditor, size).deciders
                assert third not in (owner, auditor)
    assert Audit(0, 0, 1, 0, 2).deciders == (1, 0)


THREE = Audit(8, 1, owner=2, auditor=0, size=3)
TWO = Audit(8, 1, owner=1, auditor=0, size=2)


@pytest.mark.parametrize(
    ("audit", "first", "again", "ranks", "known", "how"),
    [
        (THREE, {2: 7, 0: 5}, {1: 5}, (2,), True, "ranks 0 and 1 got the same bits"),
        (THREE, {2: 7, 0: 5}, {1: 7}, (0,), True, "ranks 1 and 2 got the same bits"),
        (THREE, {2: 7, 0: 5}, {1: 3}, (0, 1, 2), False, "third result"),
        (THREE, {2: 7, 0: 5}, {}, (0, 2), False, "rank 1 could not run the lane"),
        (TWO, {1: 7, 0: 5}, {1: 5, 0: 5}, (1,), True, "rank 1 got other bits than before"),
        (TWO, {1: 7, 0: 5}, {1: 7, 0: 7}, (0,), True, "rank 0 got other bits than before"),
        (TWO, {1: 7, 0: 5}, {1: 7, 0: 5}, (0, 1), False, "it takes a third rank"),
        (TWO, {1: 7, 0: 5}, {1: 1, 0: 2}, (0, 1), False, "both got other bits than before"),
        (TWO, {1: 7, 0: 5}, {1: 7}, (0, 1), False, "could not be run once more"),
    ],
)
def test_who_is_wrong(
    audit: Audit, first: dict[int, int], again: dict[int, int], ranks: tuple[int, ...], known: bool, how: str
) -> None:
    verdict = decide(audit, first, again)
    assert (verdict.ranks, verdict.known) == (ranks, known)
    assert how in verdict.how
