"""When waits are a deadlock, from what ranks say about themselves. Each case is a table of what two or three say."""

from dataclasses import dataclass, field, replace

import pytest

from paceline.collectives.deadlock import LOOKS, DeadlockDetector
from paceline.collectives.peers import Identity, Issued, PeerRecord, Wait

ME = Identity("host", "host", 1, "1")
CHECKED = Wait("the start of all_reduce(sum) of float32[2]", 1.0, "checked", " at train.py:12 in main")
BUCKET = Wait("bucket 0 of backward 3", 2.0, "replica 1", " at train.py:20 in main")
OTHER = Wait("bucket 0 of backward 3", 2.0, "replica 2")
MEETING = Wait("the forming of replica 2's own group", 2.0, "replica 2")


@dataclass(frozen=True)
class Says:
    """What a rank says: where it waits, how many collectives it has started per sequence, and its other threads."""

    waits: list[Wait]
    issued: dict[str, int] = field(default_factory=dict)
    free: int = 0

    def record(self) -> PeerRecord:
        sequences = {name: Issued(issued, ["all_reduce"] * min(issued, 16)) for name, issued in self.issued.items()}
        return PeerRecord(ME, self.waits, self.free, sequences)


def conclude(ranks: list[Says], size: int | None = None, settle_s: float = 60.0, looks: int = LOOKS + 1) -> str | None:
    detector = DeadlockDetector(size or len(ranks), settle_s)
    found = None
    for look in range(looks):
        found = detector.check({rank: replace(says.record(), looks=look) for rank, says in enumerate(ranks)})
    return found


PROVEN = {
    "a missing checked collective, then a backward": [
        Says([CHECKED], {"checked": 5, "replica 1": 8}),
        Says([BUCKET], {"checked": 4, "replica 1": 9}),
    ],
    "two replicas in different orders": [
        Says([BUCKET], {"replica 1": 4, "replica 2": 2}),
        Says([OTHER], {"replica 1": 3, "replica 2": 3}),
    ],
    "a replica that one rank does not have": [
        Says([CHECKED], {"checked": 5}),
        Says([BUCKET], {"checked": 4, "replica 1": 1}),
    ],
    "a third rank is in step with one of the two": [
        Says([CHECKED], {"checked": 5, "replica 1": 8}),
        Says([BUCKET], {"checked": 4, "replica 1": 9}),
        Says([CHECKED], {"checked": 5, "replica 1": 8}),
    ],
    "two threads of a rank, and both are blocked": [
        Says([CHECKED, OTHER], {"checked": 5, "replica 1": 8, "replica 2": 3}),
        Says([BUCKET], {"checked": 4, "replica 1": 9, "replica 2": 2}),
    ],
}


@pytest.mark.parametrize("case", PROVEN)
def test_proven(case: str) -> None:
    found = conclude(PROVEN[case])
    assert found is not None
    assert found.startswith("deadlock: the ranks are waiting for each other in different operations: rank 0 ")


def test_both_sides_are_named() -> None:
    found = conclude(PROVEN["a missing checked collective, then a backward"])
    assert found is not None
    assert "rank 0 waits in the start of all_reduce(sum) of float32[2] at train.py:12 in main; " in found
    assert "rank 1 waits in bucket 0 of backward 3 at train.py:20 in main. Every rank must" in found


NOT_PROVEN = {
    "a rank that computes": [
        Says([CHECKED], {"checked": 5, "replica 1": 8}),
        Says([], {"checked": 4, "replica 1": 8}, free=1),
    ],
    "a rank with another thread that may still come": [
        Says([CHECKED], {"checked": 5, "replica 1": 8}, free=1),
        Says([BUCKET], {"checked": 4, "replica 1": 9}),
    ],
    "bytes that are slow, from a rank that has gone on": [
        Says([BUCKET], {"checked": 4, "replica 1": 9}),
        Says([CHECKED], {"checked": 5, "replica 1": 9}),
    ],
    "one thread of two can go on": [
        Says([CHECKED, OTHER], {"checked": 5, "replica 1": 8, "replica 2": 3}),
        Says([BUCKET], {"checked": 4, "replica 1": 9, "replica 2": 3}),
    ],
    "a rank whose timeout is near": [
        Says([replace(CHECKED, brief=True)], {"checked": 5, "replica 1": 8}),
        Says([BUCKET], {"checked": 4, "replica 1": 9}),
    ],
    "two ranks wait together for a third that is slow": [
        Says([CHECKED], {"checked": 5}),
        Says([CHECKED], {"checked": 5}),
        Says([], {"checked": 4}, free=1),
    ],
    "something that is not counted": [
        Says([CHECKED], {"checked": 5}),
        Says([MEETING], {"checked": 4}),
    ],
}


@pytest.mark.parametrize("case", NOT_PROVEN)
def test_not_proven(case: str) -> None:
    assert conclude(NOT_PROVEN[case]) is None


def test_what_is_not_counted_is_a_deadlock_only_after_a_while() -> None:
    ranks = NOT_PROVEN["something that is not counted"]
    assert conclude(ranks, settle_s=0.0) is not None
    assert conclude([*ranks[:1], replace(ranks[1], free=1)], settle_s=0.0) is None


def test_a_rank_that_says_nothing_may_still_come() -> None:
    ranks = PROVEN["a missing checked collective, then a backward"]
    assert conclude(ranks, size=3) is None


def test_every_rank_must_have_looked_again() -> None:
    ranks = [says.record() for says in PROVEN["a missing checked collective, then a backward"]]
    detector = DeadlockDetector(2, 60.0)
    for look in range(10):  # rank 1 is frozen, and its record old
        assert detector.check({0: replace(ranks[0], looks=look), 1: ranks[1]}) is None


def test_a_change_begins_the_count_anew() -> None:
    before = PROVEN["a missing checked collective, then a backward"]
    after = [before[0], Says([replace(BUCKET, since=3.0)], before[1].issued)]
    detector = DeadlockDetector(2, 60.0)
    for look in range(20):
        ranks = (before, after)[look // LOOKS % 2]
        assert detector.check({rank: replace(says.record(), looks=look) for rank, says in enumerate(ranks)}) is None
