"""How a member becomes a rank of the next generation, with the state from which that generation continues."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from paceline.collectives.group import Group
from paceline.elastic.before_attempt import BeforeAttempt
from paceline.elastic.declared import WHOLE, Declared
from paceline.elastic.generations import Generations
from paceline.elastic.healing import Standing, check, check_parameters, compare_declared, receive
from paceline.elastic.losses import LOSSES
from paceline.elastic.split_state import SplitState
from paceline.elastic.step_votes import PreemptionVotes
from paceline.elastic.transaction import Transaction
from paceline.errors import WorldNotFormed
from paceline.member_messages import NEVER, Generation, MemberReady
from paceline.progress import Phase, own_progress
from paceline.replica.membership import enter_generation

logger = logging.getLogger("paceline")

FORMINGS = 30  # failures in a row: then more is wrong than members that leave


class Joining:
    """Moves the declared objects from one generation to the next."""

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
        # This rank's initial state, until the first generation has a state: an attempt to form it that failed may have
        # changed the objects already.
        self._initial: dict[str, SplitState] | None = None
        self._told = ""

    def begin(self) -> Group | None:
        """Before the first step: the first generation, or the newest checkpoint of a fixed world."""
        if self._generations is not None:
            self._check()
            return self.join()
        if not self._take_newest(fresh=True):
            self._transaction.take(0)
        return None

    def join(self, reason: str = "") -> Group:
        """Become a rank of the next generation. Returns the group of its ranks. `reason`: the error of all ranks that
        ended the previous one, if its step is to be repeated."""
        generations = self._generations
        assert generations is not None
        for _ in range(FORMINGS):
            try:
                generation, group = generations.enter_next(self._ready(reason))
                self._enter_and_tell(generation, group)
                generations.formed()
            except LOSSES as error:  # a member left while it formed, so there will be another
                logger.info("generation %d was not formed: %s", generations.number, error)
                reason = ""
                continue
            own_progress().note(Phase.BETWEEN, self._transaction.step)
            return group
        raise WorldNotFormed(f"{FORMINGS} generations in a row, up to {generations.number}, could not be formed")

    def _enter_and_tell(self, generation: Generation, group: Group) -> None:
        """Report an error that no other member caused, so that the others do not wait until this process ends."""
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
                "without lanes= a step's result depends on the number of ranks, so the bits of this run may change "
                "when ranks join or leave; pass lanes= to DistributedDataParallel for equal bits in every world"
            )

    def _ready(self, reason: str) -> MemberReady:
        """This rank's state, for the launcher."""
        declared, mark = self._declared, self._transaction
        cut = declared.held if self._initial is None else WHOLE
        return MemberReady(
            NEVER, mark.step, mark.whole, reason, cut.shards, cut.shard, declared.multiple, declared.divides
        )

    def _enter(self, generation: Generation, group: Group) -> None:
        """The group has formed: move all declared objects to it."""
        declared = self._declared
        for thing in declared.followers:
            thing.follow_group()
        for replica in declared.replicas:
            enter_generation(replica)
        sources = [generation.rank_of(member) for member in generation.sources]
        own = self._standing(generation, group, sources)
        stands = compare_declared(group, declared, own)
        if self._preemption is not None:
            self._preemption.meet(group)
        if generation.fresh and self._initial is None:
            self._initial = declared.state()
        if (generation.fresh or not sources) and self._take_newest(fresh=generation.fresh):
            self._tell_what_is_lost_with_a_rank(group)
            return
        if not sources:
            raise WorldNotFormed(self._why_nothing_is_whole())
        if any(stand.behind or stand.moves for stand in stands):
            received = receive(group, declared, sources, own, self._initial)
            if own.behind or own.moves:
                self._transaction.tear()  # until the state is complete
            declared.take_up_cut()
            declared.take(received.state)
            self._go_on(generation.step)
            check(group, declared, received, sources)
        else:
            declared.take_up_cut()
            self._go_on(generation.step)
        if any(stand.moves or stand.lacking for stand in stands):
            declared.complete_parameters()
            check_parameters(group, declared)
        self._tell_what_is_lost_with_a_rank(group)

    def _standing(self, generation: Generation, group: Group, sources: Sequence[int]) -> Standing:
        mark, declared = self._transaction, self._declared
        has_it = group.rank in sources if generation.fresh else mark.whole and mark.step == generation.step
        apart = self._initial is not None or declared.held != declared.due
        moves = bool(declared.in_shards) and (apart or not has_it)
        return Standing(behind=not has_it, moves=moves, lacking=declared.lacking)

    def _tell_what_is_lost_with_a_rank(self, group: Group) -> None:
        """Log what a loss costs, at the start and whenever that changes."""
        if group.rank or not self._declared.in_shards:
            return
        holders = group.size // self._declared.held.shards
        if holders > 1:
            text = f"each shard is held by {holders} ranks: the shard of a lost rank comes from its twin"
        elif self._begin is not None:
            text = "a lost rank takes its shard with it: the job then continues from the newest checkpoint"
        else:
            text = (
                "a lost rank takes its shard with it and ends the job: there are no checkpoints= to continue from. "
                "Pass checkpoints= to paceline.Elastic, or keep every shard on two ranks with shard= or copies="
            )
        if text != self._told:
            logger.warning("%s", text)
        self._told = text

    def _why_nothing_is_whole(self) -> str:
        lost = "no remaining rank holds one of its shards" if self._declared.in_shards else ""
        return (
            f"no remaining rank has the complete state of a step{lost and f' ({lost})'}, and there is no checkpoint to "
            f"continue from: pass checkpoints=paceline.Checkpointer(...) to paceline.Elastic, and save"
            + (", or keep every shard on two ranks with shard= or copies=" if lost else "")
        )

    def _take_newest(self, *, fresh: bool) -> bool:
        """Continue from a stored state, if there is one. All ranks call it. `fresh`: no rank has trained yet."""
        if self._begin is None:
            return False
        self._transaction.tear()
        self._declared.take_up_cut()  # which is loaded into
        step = self._begin(fresh)
        if step is None:
            return False
        self._go_on(step)
        return True

    def _go_on(self, step: int) -> None:
        self._before.forget()
        self._initial = None
        self._transaction.take(step)
        for replica in self._declared.replicas:
            replica._core.step_state.took(step)
