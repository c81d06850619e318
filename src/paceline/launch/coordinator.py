"""Who is in which generation of an elastic job: a state machine that starts no process and reads no clock.

    FOUNDING   processes start; the first generation waits until all are ready, or until enough are ready and patience
    has run out GATHERING  a generation is over; the next one waits until all survivors have left the last one and
    enough members are ready FORMING    the members know their ranks, connect, and receive the state WORKING    all have
    formed it FINISHING  a member has passed the last barrier; no member is replaced any more OVER       given up, or
    stopped: members that wait for a generation are refused

It receives the members' messages and exits as events, and returns actions. A generation never has a dead member when it
is announced, and none is announced while a living member of the previous one may still be in it.

A job that is stopped from outside goes through these stages with the ranks that it has, because they can only save
together: members that leave the last generation meet in another, even below the minimum. No process is started or
admitted any more.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import IllegalMove
from paceline.launch.elastic_actions import (
    Action,
    Departure,
    EndMember,
    Formed,
    GiveUp,
    Loss,
    Lost,
    Spawn,
    Tell,
    Waiting,
)
from paceline.launch.job import ElasticTerms
from paceline.launch.lines import name_ranks
from paceline.launch.next_generation import choose_members, next_generation, world_sizes
from paceline.launch.retries import Retries
from paceline.launch.stage import LEGAL, Stage
from paceline.member_messages import (
    NEVER,
    Finished,
    FromLauncher,
    FromMember,
    Generation,
    MemberFailed,
    MemberFormed,
    MemberLeft,
    MemberReady,
    MemberStore,
    Refused,
    Regroup,
    StoreAt,
)

# After this many processes in a row that ended before they could join, no more are started.
STILLBORN = 3
# Members that regroup leave one after the other. One that does not follow within this time is told that the others have
# left.
REGROUP_S = 5.0
# Not reported: a spare that is about to join.
SAY_SHORT_S = 1.0
# How long a survivor may be busy with its step before it is reported that others wait for it.
SAY_AFTER_S = 10.0
STOPPING = "the job was asked to end, so no rank is admitted any more"
NOTHING_WHOLE = "the job was asked to end, and no remaining rank has the complete state of a step"


@dataclass
class _Living:
    """A member whose process runs."""

    member: int
    slot: int
    ready: MemberReady | None = None  # it waits for a generation
    joined: bool = False  # it has waited for one
    generation: int = NEVER  # the last one that it was in, its rank there, and whether it has formed it
    rank: int = NEVER
    formed: bool = False
    failed: MemberFailed | None = None  # what its script has raised, unless the script caught it
    failed_at: float = 0.0


class Coordinator:
    """Decides what happens next. Every method that takes an event returns actions, in order."""

    def __init__(self, terms: ElasticTerms) -> None:
        self.stage = Stage.FOUNDING
        self.generation: Generation | None = None  # the last announced one
        self.losses: list[Loss] = []
        self.outages_s: list[float] = []  # from the end of a generation until the next was formed
        self._terms = terms
        self._retries = Retries()
        self._living: dict[int, _Living] = {}
        self._next_member = 0
        self._seats: set[int] = set()  # members that may still be in the last generation
        self._formed: set[int] = set()
        self._joined = 0  # the number of members that were not in the previous generation
        self._ever_formed = False
        self._quiet: list[MemberLeft] | None = None  # members that have left to regroup; None if none was asked to
        self._over_since = 0.0  # when the last generation ended, or the job began
        self._asked_at = 0.0  # when members were last asked to regroup, or to form a generation
        self._enough_since: float | None = None  # when enough members were ready to begin
        self._short_since: float | None = None
        self._said: set[str] = set()  # messages already given about the current wait
        self._stillborn = 0  # the number of processes in a row that ended before they waited for a generation
        self._stopping = False
        self._refusal = ""  # the answer to members that wait for a generation when none is formed any more

    # Events -----------------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """The job begins."""
        self._over_since = now
        return [self._spawn(slot) for slot in range(self._terms.maximum)]

    def said(self, member: int, message: FromMember, now: float) -> list[Action]:
        """A member has sent a message. From a dead member, or about an ended generation, it changes nothing."""
        living = self._living.get(member)
        if living is None or self.stage is Stage.FINISHING:
            return []
        if self.stage is Stage.OVER:
            return [Tell(member, Refused(self._refusal))] if isinstance(message, MemberReady) else []
        if isinstance(message, MemberReady):
            return list(self._on_ready(living, message, now))
        generation = self.generation
        if generation is None or message.generation != generation.number or member not in generation.members:
            return []
        if isinstance(message, MemberStore):
            return list(self._on_store(member, message, generation))
        if isinstance(message, MemberFormed):
            return list(self._on_formed(member, generation, now))
        if isinstance(message, MemberFailed):
            return list(self._on_failed(living, message, now))
        return list(self._on_finished(generation, now))

    def exited(self, member: int, how: Departure, now: float) -> list[Action]:
        """The process of a member has ended."""
        living = self._living.pop(member, None)
        if living is None or self.stage in (Stage.FINISHING, Stage.OVER):
            return []
        return list(self._on_loss(living, how, now))

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return list(self._on_tick(now))

    def stop(self, now: float) -> list[Action]:
        """The job is stopped from outside."""
        if self._stopping or self.stage is Stage.OVER:
            return []
        self._stopping = True
        return list(self._on_stop(now))

    @property
    def awaited(self) -> frozenset[int]:
        """The members that others may wait for. The watchdog watches these, and not members that wait for a
        generation."""
        return frozenset(self._seats)

    # Messages of
    # members------------------------------------------------------------------------------------------------

    def _on_ready(self, living: _Living, message: MemberReady, now: float) -> Iterator[Action]:
        seated = living.member in self._seats
        if seated and self.generation is not None and message.was != self.generation.number:
            return  # sent before it knew of this generation
        if self._stopping and not seated:
            yield Tell(living.member, Refused(STOPPING))
            return
        living.ready, living.joined, living.failed = message, True, None
        self._stillborn = 0
        if seated:
            quietly = self._quiet is not None and not message.reason
            yield from self._leave(living.member, message.reason or "has left it", now, quietly=quietly)
        if message.reason and self._retries.is_hopeless(message.was, message.step, message.reason):
            yield self._give_up_step(living, message.step, message.reason)
        else:
            yield from self._go_on(now)

    def _on_store(self, member: int, message: MemberStore, generation: Generation) -> Iterator[Action]:
        if self.stage is Stage.FORMING and member == generation.members[0]:
            yield from self._tell_seats(StoreAt(generation.number, message.host, message.port))

    def _on_formed(self, member: int, generation: Generation, now: float) -> Iterator[Action]:
        self._formed.add(member)
        self._living[member].formed = True
        if self.stage is Stage.FORMING and self._formed >= set(generation.members):
            yield from self._work(generation, now)
            yield from self._fill_slots()
            yield from self._go_on(now)

    def _work(self, generation: Generation, now: float) -> Iterator[Action]:
        self._go(Stage.WORKING)
        took_s = now - self._over_since
        if self._ever_formed:
            self.outages_s.append(took_s)
        self._ever_formed = True
        self._said.clear()
        yield Formed(generation, self._joined, took_s)

    def _on_failed(self, living: _Living, message: MemberFailed, now: float) -> Iterator[Action]:
        cause = f"raised {message.reason.rstrip(': ')}"
        living.failed, living.failed_at, living.ready = message, now, None
        yield self._note_loss(living, message.step, cause)
        if living.member in self._seats:
            yield from self._leave(living.member, cause, now)
        if self._is_too_many():
            yield self._give_up_losses()
        elif not self._stopping and self._retries.is_hopeless(message.generation, message.step, cause):
            yield self._give_up_step(living, message.step, cause)
        else:
            yield from self._go_on(now)

    def _on_finished(self, generation: Generation, now: float) -> Iterator[Action]:
        if self.stage is Stage.FORMING:
            yield from self._work(generation, now)  # the messages of the others are still on their way
        yield from self._tell_members(generation, Finished(generation.number))
        for member in self._living:
            if member not in generation.members:
                yield EndMember(member)
        self._seats.clear()
        self._go(Stage.FINISHING)

    # Coming and going -------------------------------------------------------------------------------------------------

    def _on_loss(self, living: _Living, how: Departure, now: float) -> Iterator[Action]:
        if living.failed is not None:  # this was handled when it reported it, except for its replacement
            yield from self._replace(living, how)
            yield from self._go_on(now)
            return
        if not how.asked:
            yield self._note_loss(living, how.step, how.cause)
        if living.member in self._seats:
            yield from self._leave(living.member, how.cause, now)
        counts = living.generation != NEVER and not how.from_outside and not self._stopping
        if self._is_too_many():
            yield self._give_up_losses()
        elif counts and self._retries.is_hopeless(living.generation, how.step, how.cause):
            yield self._give_up_step(living, how.step, how.cause)
        else:
            yield from self._replace(living, how)
            yield from self._go_on(now)

    def _note_loss(self, living: _Living, step: int, cause: str) -> Lost:
        self.losses.append(Loss(living.member, living.slot, living.rank, step, cause))
        return Lost(self.losses[-1])

    def _is_too_many(self) -> bool:
        limit = self._terms.max_losses
        return limit is not None and len(self.losses) > limit and not self._stopping

    def _replace(self, living: _Living, how: Departure) -> Iterator[Action]:
        if self._stopping:
            return
        if not living.joined and not how.from_outside:
            self._stillborn += 1
        if self._stillborn < STILLBORN:
            yield self._spawn(living.slot)
        else:
            yield from self._say(
                f"no other process is started: {self._stillborn} in a row ended before they could join, "
                f"the last of them {how.cause}"
            )

    def _leave(self, member: int, reason: str, now: float, quietly: bool = False) -> Iterator[Action]:
        """A member has left the last generation, which ends it."""
        assert self.generation is not None
        self._seats.discard(member)
        if self.stage in (Stage.WORKING, Stage.FORMING):
            if self.stage is Stage.WORKING:
                self._over_since = now
            self._go(Stage.GATHERING)
        ended = MemberLeft(self.generation.number, member, reason)
        if quietly and self._quiet is not None:
            self._quiet.append(ended)
            return
        # After this the members no longer leave after the same step.
        for one in (*(self._quiet or ()), ended):
            yield from self._tell_seats(one)
        self._quiet = None

    def _fill_slots(self) -> Iterator[Action]:
        """Start the spares. They start later, because the first generation needs the cores."""
        used = {living.slot for living in self._living.values()}
        for slot in range(self._terms.maximum, self._terms.maximum + self._terms.spares):
            if slot not in used and self._stillborn < STILLBORN and not self._stopping:
                yield self._spawn(slot)

    def _spawn(self, slot: int) -> Spawn:
        member, self._next_member = self._next_member, self._next_member + 1
        self._living[member] = _Living(member, slot)
        return Spawn(slot, member)

    # Forming ----------------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> Iterator[Action]:
        """Do everything that can be done now."""
        if self.stage is Stage.WORKING:
            yield from self._ask_to_regroup(now)
        elif self.stage is Stage.GATHERING and not self._seats and self._stopping:
            yield from self._form_last(now)
        elif self.stage in (Stage.FOUNDING, Stage.GATHERING) and not self._seats:
            candidates, ready = self._candidates(), self._ready()
            members = choose_members(candidates, ready, self._terms.maximum)
            if len(members) < self._terms.minimum:
                yield from self._wait_below_minimum(candidates, ready, now)
            elif self._has_survivors(members) or self._is_complete(candidates, now):
                yield from self._form(members, now)

    def _candidates(self) -> list[int]:
        """The candidates for the next generation: survivors in their order, then new members."""
        before = self.generation.members if self.generation is not None else ()
        waiting = self._ready()
        survivors = [member for member in before if member in waiting]
        return [*survivors, *sorted(set(waiting) - set(survivors))]

    def _ready(self) -> dict[int, MemberReady]:
        """The messages of members that wait for a generation."""
        return {member: living.ready for member, living in self._living.items() if living.ready is not None}

    def _has_survivors(self, members: list[int]) -> bool:
        """Whether any member has survived the last generation: others may join it later."""
        return self.generation is not None and not set(self.generation.members).isdisjoint(members)

    def _is_complete(self, candidates: list[int], now: float) -> bool:
        """Whether all expected members are ready, or have been waited for long enough."""
        self._enough_since = now if self._enough_since is None else self._enough_since
        awaited = [living for living in self._living.values() if living.ready is None and living.failed is None]
        late = now - self._enough_since >= self._terms.patience_s
        return len(candidates) >= self._terms.maximum or late or not awaited

    def _form_last(self, now: float) -> Iterator[Action]:
        """The job is being stopped: the survivors of the last generation meet, to save and leave together."""
        assert self.generation is not None
        ready = self._ready()
        survivors = [member for member in self.generation.members if member in ready]
        members = choose_members(survivors, ready, self._terms.maximum)
        if not members or not next_generation(0, members, ready, self._ever_formed).sources:
            yield from self._refuse_all(NOTHING_WHOLE)
            return
        yield from self._dismiss(set(survivors) - set(members))
        yield from self._form(members, now)

    def _form(self, members: list[int], now: float) -> Iterator[Action]:
        before = self.generation
        number = 0 if before is None else before.number + 1
        self.generation = next_generation(number, members, self._ready(), self._ever_formed)
        self._joined = len(set(members) - set(before.members if before is not None else ()))
        self._seats, self._formed = set(members), set()
        self._quiet, self._short_since, self._enough_since, self._asked_at = None, None, None, now
        for rank, member in enumerate(members):
            living = self._living[member]
            living.ready, living.generation, living.rank, living.formed = None, number, rank, False
        self._go(Stage.FORMING)
        yield from self._tell_seats(self.generation)

    def _ask_to_regroup(self, now: float) -> Iterator[Action]:
        assert self.generation is not None
        waiting, size = self._ready(), self.generation.size
        most = min(size + len(waiting), self._terms.maximum)
        if (
            waiting
            and not self._stopping
            and self._quiet is None
            and world_sizes(next(iter(waiting.values())), size + 1, most)
        ):
            self._quiet, self._asked_at = [], now
            yield from self._tell_seats(Regroup(self.generation.number))

    # Time -------------------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Iterator[Action]:
        for living in self._living.values():
            if living.failed is not None and now - living.failed_at > self._terms.patience_s:
                living.failed_at = float("inf")
                yield EndMember(living.member)
        if self.stage is Stage.GATHERING and self._seats:
            yield from self._hurry(now)
        elif self.stage in (Stage.FOUNDING, Stage.GATHERING):
            yield from self._go_on(now)
        elif self.stage is Stage.FORMING and now - self._asked_at > self._terms.recovery_s:
            assert self.generation is not None
            late = name_ranks(map(self.generation.rank_of, self._seats - self._formed))
            number, limit_s = self.generation.number, self._terms.recovery_s
            yield self._give_up(f"generation {number} was not formed within {limit_s:g} s; missing: {late}")

    def _hurry(self, now: float) -> Iterator[Action]:
        """Some members have left the last generation and others have not."""
        assert self.generation is not None
        if self._quiet and now - self._asked_at > REGROUP_S:
            for one in self._quiet:
                yield from self._tell_seats(one)
            self._quiet = None
        if now - self._over_since > SAY_AFTER_S:
            late = name_ranks(map(self.generation.rank_of, self._seats))
            does = "what it does" if len(self._seats) == 1 else "what they do"
            yield from self._say(f"the next generation waits for {late} to finish {does}")

    def _wait_below_minimum(
        self, candidates: list[int], ready: Mapping[int, MemberReady], now: float
    ) -> Iterator[Action]:
        terms, there, least = self._terms, len(candidates), self._terms.minimum
        if candidates:
            one = ready[candidates[0]]
            least = min(world_sizes(one, terms.minimum, terms.maximum), default=0)
            if not least:
                yield self._give_up(
                    f"the script can work only with numbers of ranks that are a multiple of {one.multiple}"
                    + (f" and divide {one.divides}" if one.divides else "")
                    + f", and none from {terms.minimum} to {terms.maximum} is"
                )
                return
        coming = sum(living.ready is None for living in self._living.values())
        if not coming:
            yield self._give_up(
                f"{_ranks(there)} left of at least {least}, and replacements ended before they could join"
            )
        elif self.stage is Stage.GATHERING:
            self._short_since = now if self._short_since is None else self._short_since
            limit_s = terms.recovery_s
            if now - self._short_since > limit_s:
                yield self._give_up(
                    f"{_ranks(there)} there of at least {least}, for longer than {limit_s:g} s; {coming} did "
                    f"not start in that time"
                )
            elif now - self._short_since >= SAY_SHORT_S:
                yield from self._say(
                    f"{_ranks(there)} left of at least {least}: waiting for {coming} to start, for at most "
                    f"{limit_s:g} s"
                )

    # The end ----------------------------------------------------------------------------------------------------------

    def _on_stop(self, now: float) -> Iterator[Action]:
        if self.stage in (Stage.FOUNDING, Stage.FINISHING):
            yield from self._refuse_all(STOPPING)
            return
        assert self.generation is not None
        gathering = self.stage is Stage.GATHERING
        survivors = set(self.generation.members) if gathering else set()
        yield from self._dismiss(self._ready().keys() - survivors)
        yield from self._go_on(now)

    def _dismiss(self, members: Iterable[int]) -> Iterator[Action]:
        """These have waited for a generation and are no longer in any."""
        for member in sorted(members):
            self._living[member].ready = None
            yield Tell(member, Refused(STOPPING))

    def _refuse_all(self, reason: str) -> Iterator[Action]:
        """No further generation is formed, whichever members become ready."""
        waiting, self._refusal = sorted(self._ready()), reason
        self._seats.clear()
        self._go(Stage.OVER)
        yield from (Tell(member, Refused(reason)) for member in waiting)

    def _give_up_losses(self) -> GiveUp:
        return self._give_up(f"{_ranks(len(self.losses))} lost, and at most {self._terms.max_losses} may be")

    def _give_up_step(self, living: _Living, step: int, cause: str) -> GiveUp:
        if not living.formed:  # which a fresh start may change
            return self._give_up(f"two generations could not be formed: a rank {cause}")
        return self._give_up(
            f"step {step} has failed in two generations, so it is not tried again: a rank {cause}", final=True
        )

    def _give_up(self, reason: str, final: bool = False) -> GiveUp:
        self._refusal = reason
        self._seats.clear()
        self._go(Stage.OVER)
        return GiveUp(reason, final)

    # ------------------------------------------------------------------------------------------------------------------

    def _go(self, stage: Stage) -> None:
        if stage not in LEGAL[self.stage]:
            raise IllegalMove(f"an elastic job cannot go from {self.stage.name} to {stage.name}")
        self.stage = stage

    def _say(self, text: str) -> Iterator[Action]:
        """Report it once per wait."""
        if text not in self._said:
            self._said.add(text)
            yield Waiting(text)

    def _tell_seats(self, message: FromLauncher) -> Iterator[Action]:
        yield from (Tell(member, message) for member in sorted(self._seats))

    def _tell_members(self, generation: Generation, message: FromLauncher) -> Iterator[Action]:
        yield from (Tell(member, message) for member in generation.members if member in self._living)


def _ranks(number: int) -> str:
    """Continued by "left", "lost" or "there"."""
    return "1 rank is" if number == 1 else f"{number} ranks are"
