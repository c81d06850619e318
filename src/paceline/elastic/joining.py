"""How a member becomes a rank of the next generation, with the state that this generation goes on from."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from paceline.collectives.group import Group
from paceline.elastic.before_attempt import BeforeAttempt
from paceline.elastic.declared import Declared
from paceline.elastic.generations import Generations
from paceline.elastic.healing import compare_declared, heal
from paceline.elastic.losses import LOSSES
from paceline.elastic.step_votes import PreemptionVotes
from paceline.elastic.transaction import Transaction
from paceline.errors import WorldNotFormed
from paceline.member_messages import Generation
from paceline.progress import Phase, own_progress
from paceline.replica.membership import enter_generation

logger = logging.getLogger("paceline")

FORMINGS = 30  # in a row that fail: then there is more amiss than members that leave


class Joining:
    """Brings what a script has declared from one generation into the next."""

    def __init__(
        self,
        declared: Declared,
        transaction: Transaction,
        before: BeforeAttempt,
        begin: Callable[[bool], int | None] | None,
        generations: Generations | None,
        preemption: PreemptionVotes | None,
    ) -> None:
        self._declared = declared
        self._transaction = transaction
        self._before = before
        self._begin = begin
        self._generations = generations
        self._preemption = preemption

    def begin(self) -> Group | None:
        """Before the first step: the first generation, or the newest checkpoint of a world that stays as it is."""
        if self._generations is not None:
            self._check()
            return self.join()
        if not self._take_newest(fresh=True):
            self._transaction.take(0)
        return None

    def join(self, reason: str = "") -> Group:
        """Become a rank of the next generation. Returns the group of its ranks. `reason`: the error of all ranks that
        has ended the one before, if it is to be made again."""
        generations = self._generations
        assert generations is not None
        for _ in range(FORMINGS):
            try:
                generation, group = generations.enter_next(self._transaction, reason)
                self._enter_and_tell(generation, group)
                generations.formed(self._abort)
            except LOSSES as error:  # a member has left while it formed, so there will be another
                logger.info("generation %d was not formed: %s", generations.number, error)
                reason = ""
                continue
            own_progress().note(Phase.BETWEEN, self._transaction.step)
            return group
        raise WorldNotFormed(f"{FORMINGS} generations in a row, up to {generations.number}, could not be formed")

    def _enter_and_tell(self, generation: Generation, group: Group) -> None:
        """An error that is no other member's fault is told, so that the others do not wait until this process ends."""
        assert self._generations is not None
        try:
            self._enter(generation, group)
        except LOSSES:
            raise
        except Exception as error:
            self._generations.tell_failure(self._transaction.step, error)
            raise

    def _check(self) -> None:
        most = os.environ.get("WORLD_SIZE", "1")
        replicas: Sequence[Any] = self._declared.replicas
        self._declared.check_replicas(int(most) if most.isdigit() else 1)
        assert self._generations is not None
        if self._generations.member.id == 0 and any(replica._lane_count is None for replica in replicas):
            logger.warning(
                "without lanes= the result of a step depends on how many ranks make it, so this run may have other "
                "bits when ranks have come or gone; pass lanes= to DistributedDataParallel for the same in every world"
            )

    def _enter(self, generation: Generation, group: Group) -> None:
        """The group has formed: all that was declared moves to it."""
        for thing in self._declared.followers:
            thing.follow_group()
        for replica in self._declared.replicas:
            enter_generation(replica)
        mark, fresh = self._transaction, generation.fresh
        sources = [generation.rank_of(member) for member in generation.sources]
        has_it = group.rank in sources if fresh else mark.whole and mark.step == generation.step
        behind = compare_declared(group, self._declared, behind=not has_it)
        if self._preemption is not None:
            self._preemption.meet(group)
        if (fresh or not sources) and self._take_newest(fresh=fresh):
            return
        if not sources:
            raise WorldNotFormed(
                "no rank that is left has the whole state of a step, and there is no checkpoint to go on from: pass "
                "checkpoints=paceline.Checkpointer(...) to paceline.Elastic, and save"
            )
        if any(behind):
            if not has_it:
                mark.tear()  # until all of it is there
            heal(group, self._declared, sources[0], behind=not has_it)
        self._go_on(generation.step)

    def _take_newest(self, *, fresh: bool) -> bool:
        """Go on from what was stored, if anything was. All ranks call it. `fresh`: nobody has trained yet."""
        if self._begin is None:
            return False
        self._transaction.tear()
        step = self._begin(fresh)
        if step is None:
            return False
        self._go_on(step)
        return True

    def _go_on(self, step: int) -> None:
        self._before.forget()
        self._transaction.take(step)
        for replica in self._declared.replicas:
            replica._core.step_state.took(step)

    def _abort(self) -> None:
        """On a device: end what replicas have under way, whatever rank it waits for."""
        for replica in self._declared.replicas:
            if hasattr(replica._transport, "abort"):
                replica._transport.abort()
