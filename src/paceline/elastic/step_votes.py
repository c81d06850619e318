"""Votes in the step report, which all ranks read in the same step: to leave their generation for one with more ranks,
and whether any of them was asked to stop.
"""

from collections.abc import Sequence
from typing import Any

from paceline.checkpoint.preemption import Preemption
from paceline.collectives.gather import gather_ints
from paceline.collectives.group import Group
from paceline.elastic.declared import Declared
from paceline.errors import UsageError
from paceline.reducer.report import Vote


def ask_all(replicas: Sequence[Any], vote: Vote) -> None:
    """Cast a vote, which all ranks read in the next reduction."""
    for replica in replicas:
        replica._core.reports.votes |= vote


def was_asked(replicas: Sequence[Any], vote: Vote) -> bool:
    """Whether any rank has cast it, in a reduction whose reports were read: the same on all ranks."""
    return any(vote in told for replica in replicas for told in replica._core.reports.gathered_votes)


class PreemptionVotes:
    """Carries the question of the declared `Preemption` in the step report.

    On its own it would communicate by rank 0's clock, which means nothing to a new rank.
    """

    def __init__(self, declared: Declared) -> None:
        found = {name: thing for name, thing in declared.things.items() if isinstance(thing, Preemption)}
        if len(found) > 1:
            raise UsageError(
                f"{' and '.join(f'{name}=' for name in found)} were each given a Preemption, but a step report has one "
                f"vote: declare one Preemption, with all signals"
            )
        self._preemption = next(iter(found.values()), None)
        self._replicas = declared.replicas
        if self._preemption is not None:
            self._preemption.carry(self.ask)

    def ask(self) -> None:
        """A step begins, or a signal has just come, which this step's report may still carry."""
        if self._preemption is not None and self._preemption.asked:
            ask_all(self._replicas, Vote.PREEMPTED)

    def read(self, group: Group) -> None:
        """A step was committed."""
        if self._preemption is not None:
            asked = self._preemption.asked if group.size == 1 else was_asked(self._replicas, Vote.PREEMPTED)
            self._preemption.hear(asked)

    def meet(self, group: Group) -> None:
        """A generation has formed, in which some ranks may know of a request that others do not. All ranks call it."""
        if self._preemption is not None:
            known = self._preemption.agreed() or self._preemption.asked
            rows = gather_ints(group, [int(known)], "the comparison of who was asked to stop")
            self._preemption.hear(any(row[0] for row in rows))
