"""Audits: one lane of a step is computed a second time by another rank, and the gradients are compared bit by bit.

Which lane, and by which rank, follows from the step alone, so no communication is needed. What follows from the digests
is decided here too; nothing in this file communicates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.agree.drift import groups_of, ranks_text
from paceline.blocks import lanes_of

Digests = Mapping[int, int]  # of the lane's gradients, by the rank that computed them


@dataclass(frozen=True, slots=True)
class Audit:
    """One audit: which lane is computed again, and by which rank."""

    step: int
    lane: int
    owner: int  # the rank that runs the lane in this step
    auditor: int
    size: int

    @property
    def deciders(self) -> tuple[int, ...]:
        """The ranks that compute the lane once more if owner and auditor differ: a third rank or, in a world of two,
        both."""
        third = next((rank for rank in self._after_auditor() if rank != self.owner), None)
        return (self.owner, self.auditor) if third is None else (third,)

    def _after_auditor(self) -> list[int]:
        return [(self.auditor + more) % self.size for more in range(1, self.size)]


def audit_of(step: int, every: int, lanes: int, size: int) -> Audit | None:
    """The audit of step `step`, if there is one. Lanes take turns, and then the auditors do: within
    lanes × (size - 1) audits every lane of every rank is computed by every other rank."""
    if not every or size < 2 or step % every:
        return None
    turn, lane = divmod(step // every, lanes)
    owner = next(rank for rank in range(size) if lane in lanes_of(rank, size, lanes))
    return Audit(step, lane, owner, (owner + 1 + turn % (size - 1)) % size, size)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which rank computes wrong results, and how that is known."""

    ranks: tuple[int, ...]  # those at fault, or all that differ if that is not known
    known: bool  # whether it is known that these ranks, and no others, are at fault
    how: str  # as a sentence


def decide(audit: Audit, first: Digests, again: Digests) -> Verdict:
    """`first`: of owner and auditor, which differ. `again`: of those deciders that could compute the lane once more."""
    both = (min(audit.owner, audit.auditor), max(audit.owner, audit.auditor))
    if audit.size == 2:
        return _decide_of_two(both, first, again)
    found = {**first, **again}
    if len(found) == 2:
        return Verdict(both, False, f"{_could_not(audit)}, so it is not known which of them is wrong")
    known = sorted(found)
    groups = groups_of([found[rank] for rank in known], known)
    if len(groups) == 3:
        return Verdict(
            tuple(known),
            False,
            f"{ranks_text(audit.deciders)} got a third result, so the lane depends on more than its microbatch, step "
            f"and number: use deterministic kernels, and nothing in the loop that depends on the rank",
        )
    (agree, (odd,)) = groups
    return Verdict((odd,), True, f"{ranks_text(agree)} got the same bits")


def _decide_of_two(both: tuple[int, int], first: Digests, again: Digests) -> Verdict:
    """With two ranks there is no third opinion, but a rank that contradicts itself is at fault."""
    if len(again) < 2:
        return Verdict(both, False, "the lane could not be run once more, so it is not known which of them is wrong")
    fickle = tuple(sorted(rank for rank in both if again[rank] != first[rank]))
    if len(fickle) == 1:
        return Verdict(fickle, True, f"when both ran it once more, {ranks_text(fickle)} got other bits than before")
    if fickle:
        return Verdict(
            both,
            False,
            "when both ran it once more, both got other bits than before, so the lane depends on more than its "
            "microbatch, step and number: use deterministic kernels, and nothing in the loop that depends on the rank",
        )
    return Verdict(
        both,
        False,
        "both got the same bits again, so one of them is wrong every time, and it takes a third rank to say which",
    )


def _could_not(audit: Audit) -> str:
    return f"{ranks_text(audit.deciders)} could not run the lane as a third"
