"""The coordinator of an elastic job: who is in which generation, whatever members say and however they end."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import IllegalMove, UsageError
from paceline.launch.coordinator import REGROUP_S, SAY_AFTER_S, STILLBORN, Coordinator
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
from paceline.launch.next_generation import choose_members, next_generation, world_sizes
from paceline.launch.retries import Retries
from paceline.launch.stage import LEGAL, Stage
from paceline.member_messages import (
    NEVER,
    Finished,
    FromMember,
    Generation,
    MemberFailed,
    MemberFinished,
    MemberFormed,
    MemberLeft,
    MemberReady,
    MemberStore,
    Refused,
    Regroup,
    StoreAt,
)

KILLED = Departure("was killed by SIGKILL", 7, from_outside=True)
CRASHED = Departure("was killed by SIGSEGV", 7)


class Job:
    """A coordinator, a clock, and the members as a launcher would have them."""

    def __init__(self, minimum: int = 2, maximum: int = 3, **terms: int | float | None) -> None:
        self.terms = dataclasses.replace(ElasticTerms(minimum=minimum, maximum=maximum), **terms)  # type: ignore[arg-type]
        self.coordinator = Coordinator(self.terms)
        self.now = 100.0
        self.slots: dict[int, int] = {}  # of living members
        self.received: dict[int, list[object]] = {}
        self.done: list[Action] = []
        self.take(self.coordinator.start(self.now))

    def take(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Spawn):
                assert action.slot not in self.slots.values(), "two processes in one slot"
                assert action.member not in self.received, "the number of a member is given twice"
                self.slots[action.member] = action.slot
                self.received[action.member] = []
            elif isinstance(action, Tell):
                assert action.member in self.slots, "the dead are told nothing"
                self.received[action.member].append(action.message)
        self.done += actions
        return actions

    def say(self, member: int, message: FromMember) -> list[Action]:
        return self.take(self.coordinator.said(member, message, self.now))

    def ready(self, *members: int, step: int = 0, whole: bool = False, was: int | None = None) -> None:
        for member in members:
            self.say(member, MemberReady(self.number if was is None else was, step, whole))

    def exit(self, member: int, how: Departure = KILLED) -> list[Action]:
        del self.slots[member]
        return self.take(self.coordinator.exited(member, how, self.now))

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.now += seconds
        return self.take(self.coordinator.tick(self.now))

    @property
    def number(self) -> int:
        return NEVER if self.coordinator.generation is None else self.coordinator.generation.number

    @property
    def generation(self) -> Generation:
        assert self.coordinator.generation is not None
        return self.coordinator.generation

    def form(self) -> None:
        """All members do as they are told."""
        first, *_ = self.generation.members
        self.say(first, MemberStore(self.number, 4711))
        for member in self.generation.members:
            assert self.received[member][-2:] == [self.generation, StoreAt(self.number, "127.0.0.1", 4711)]
            self.say(member, MemberFormed(self.number))

    def found(self, *members: int) -> "Job":
        self.ready(*(members or tuple(self.slots)))
        self.form()
        assert self.coordinator.stage is Stage.WORKING
        return self

    def of(self, kind: type) -> list[Action]:
        return [action for action in self.done if isinstance(action, kind)]


# ---------------------------------------------------------------------------------------------------- who is the source


@pytest.mark.parametrize(
    ("said", "formed", "sources", "step", "fresh"),
    [
        ([(5, True), (5, True), (5, True)], True, (0,), 5, False),
        ([(5, True), (6, True), (6, True)], True, (1,), 6, False),
        ([(5, True), (6, False), (0, False)], True, (0,), 5, False),
        ([(4, False), (3, True), (0, False)], True, (1,), 3, False),
        ([(5, False), (6, False)], True, (), NEVER, False),
        ([(0, False), (0, False)], False, (0,), 0, True),
        ([(3, False)], False, (0,), 3, True),
        ([(3, True), (0, False)], False, (0,), 3, False),
        # In shards: step, whether it is whole, how many shards there are, and which it has.
        ([(5, True, 2, 0), (5, True, 2, 1), (5, True, 2, 0), (5, True, 2, 1)], True, (0, 1), 5, False),
        ([(5, True, 2, 1), (5, True, 2, 1), (5, True, 2, 0)], True, (2, 0), 5, False),
        ([(5, True, 2, 1), (5, False, 2, 0), (0, False)], True, (), NEVER, False),
        ([(6, True, 2, 1), (5, True, 2, 0), (5, True, 2, 1)], True, (1, 2), 5, False),
        # The first generation was formed in vain: who has taken a shard has no more than that.
        ([(0, True, 2, 0), (0, False)], False, (1,), 0, True),
        ([(0, True, 2, 0), (0, False, 2, 1)], False, (), NEVER, False),
    ],
)
def test_the_state_is_that_of_the_newest_step_of_which_all_shards_are_there(
    said: list[tuple[Any, ...]], formed: bool, sources: tuple[int, ...], step: int, fresh: bool
) -> None:
    ready = {
        member: MemberReady(0, at, whole, shards=cut[0] if cut else 1, shard=cut[1] if cut else 0)
        for member, (at, whole, *cut) in enumerate(said)
    }
    found = next_generation(4, list(ready), ready, formed)
    assert found == Generation(4, tuple(ready), sources, step, fresh)


@pytest.mark.parametrize(
    ("shards", "terms", "maximum", "members"),
    [
        ([0, 0, 0], (1, 1), 2, [0, 1]),
        ([1, 0, 1], (2, 2), 4, [1, 0]),  # after the loss of rank 0 of 4, in groups of two: nobody moves
        ([1, 0, 1, None], (2, 2), 4, [1, 0, 3, 2]),  # its replacement gets its shard and its place
        ([0, None, 2, 3], (4, 1), 4, [0, 1, 2, 3]),  # not whole
        ([0, 1, 2, 0, 2], (3, 1), 4, [0, 1, 2, 3]),
        ([0, 0, 0, 1, 2], (3, 1), 4, [0, 1, 3, 4]),  # shards become others, but all must be there
        ([0, 1, 0], (2, 4), 4, []),
    ],
)
def test_members_are_chosen_so_that_all_shards_are_there_and_stay_where_they_are(
    shards: list[int | None], terms: tuple[int, int], maximum: int, members: list[int]
) -> None:
    of, multiple = terms
    ready = {
        member: MemberReady(0, 5, shard is not None, shards=of, shard=shard or 0, multiple=multiple)
        for member, shard in enumerate(shards)
    }
    assert choose_members(list(ready), ready, maximum) == members


def test_worlds_are_of_the_sizes_that_the_script_can_work_with() -> None:
    assert world_sizes(MemberReady(0, 0, True, multiple=2), 1, 6) == [2, 4, 6]
    assert world_sizes(MemberReady(0, 0, True, divides=12), 2, 6) == [2, 3, 4, 6]


class Pairs(Job):
    """A job whose script works in pairs of ranks."""

    def ready(self, *members: int, step: int = 0, whole: bool = False, was: int | None = None) -> None:
        for member in members:
            shard = self.generation.rank_of(member) % 2 if whole else 0
            shards = 2 if whole else 1
            message = MemberReady(self.number if was is None else was, step, whole, "", shards, shard, multiple=2)
            self.say(member, message)


def test_a_world_of_pairs_shrinks_and_grows_by_pairs() -> None:
    job = Pairs(1, 4).found()
    job.exit(0)
    job.ready(1, 2, 3, step=7, whole=True)
    job.form()
    assert job.generation == Generation(1, (2, 1), (2, 1), 7, fresh=False)
    assert not any(isinstance(message, Regroup) for message in job.received[1])  # one waits, and that is none too many
    job.ready(4)
    assert job.received[1][-1] == Regroup(1)
    job.ready(2, 1, step=9, whole=True)
    assert job.generation == Generation(2, (2, 1, 3, 4), (2, 1), 9, fresh=False)  # who has waited is behind


def test_a_job_with_no_possible_size_is_given_up() -> None:
    job = Pairs(3, 3)
    job.ready(0, 1, 2)
    (given_up,) = job.of(GiveUp)
    assert isinstance(given_up, GiveUp) and "a multiple of 2" in given_up.reason


# ---------------------------------------------------------------------------------------------------------- a plain job


def test_a_job_is_founded_when_all_have_come() -> None:
    job = Job()
    assert job.slots == {0: 0, 1: 1, 2: 2}
    job.ready(1, 0)
    assert job.coordinator.stage is Stage.FOUNDING
    job.ready(2)
    assert job.generation == Generation(0, (0, 1, 2), (0,), 0, fresh=True)
    job.now += 2
    job.form()
    assert job.of(Formed) == [Formed(job.generation, 3, 2.0)]


def test_a_job_is_founded_without_those_who_do_not_come() -> None:
    job = Job(patience_s=30.0)
    job.ready(1, 2)
    job.tick(29)
    assert job.coordinator.stage is Stage.FOUNDING
    job.tick(2)
    assert job.generation.members == (1, 2)
    job.form()
    job.ready(0, was=NEVER)
    assert job.received[1][-1] == Regroup(0)


def test_spares_are_started_when_the_first_generation_works() -> None:
    job = Job(minimum=1, maximum=2, spares=2)
    assert len(job.slots) == 2
    job.found()
    assert job.slots == {0: 0, 1: 1, 2: 2, 3: 3}
    job.ready(2, 3, was=NEVER)
    assert not any(isinstance(message, Regroup) for message in job.received[0])  # there is no room for them


def test_the_end() -> None:
    job = Job(minimum=1, maximum=2, spares=1).found()
    job.ready(2, was=NEVER)
    assert job.say(1, MemberFinished(0, 100)) == [Tell(0, Finished(0)), Tell(1, Finished(0)), EndMember(2)]
    assert job.coordinator.stage is Stage.FINISHING
    assert job.exit(0) == []
    assert job.coordinator.losses == []
    assert job.tick(1e6) == []


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_form_the_next_generation_at_once_and_the_lost_one_is_replaced(victim: int) -> None:
    job = Job(minimum=2, maximum=3).found()
    job.exit(victim)
    survivors = tuple(member for member in (0, 1, 2) if member != victim)
    for member in survivors:
        assert job.received[member][-1] == MemberLeft(0, victim, "was killed by SIGKILL")
    assert job.coordinator.losses == [Loss(victim, victim, victim, 7, "was killed by SIGKILL")]
    assert job.slots[3] == victim
    job.ready(survivors[0], step=7, whole=True)
    assert job.coordinator.stage is Stage.GATHERING  # the other may still be in the last one
    job.ready(survivors[1], step=7, whole=True)
    assert job.generation == Generation(1, survivors, (survivors[0],), 7, fresh=False)
    job.now += 0.5
    job.form()
    assert job.coordinator.outages_s == [0.5]
    job.ready(3, was=NEVER)
    assert all(job.received[member][-1] == Regroup(1) for member in survivors)
    job.ready(survivors[1], step=9, whole=True)
    assert job.received[survivors[0]][-1] == Regroup(1)  # nobody is told of one who leaves because it was asked to
    job.ready(survivors[0], step=9, whole=True)
    assert job.generation == Generation(2, (*survivors, 3), (survivors[0],), 9, fresh=False)
    job.form()
    assert job.of(Formed)[-1] == Formed(job.generation, 1, 0.0)


def test_a_spare_takes_the_place_of_the_lost_one_at_once() -> None:
    job = Job(minimum=2, maximum=2, spares=1).found()
    job.ready(2, was=NEVER)
    job.exit(0)
    job.ready(1, step=7, whole=True)
    assert job.generation == Generation(1, (1, 2), (1,), 7, fresh=False)
    assert job.slots[3] == 0  # the next spare


def test_a_loss_while_a_generation_is_formed_is_followed_by_the_next_one() -> None:
    job = Job(minimum=1, maximum=3).found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=True)
    job.say(1, MemberStore(1, 99, "192.0.2.7"))  # on another machine
    assert job.received[2][-1] == StoreAt(1, "192.0.2.7", 99)
    job.say(1, MemberFormed(1))
    job.exit(2)
    assert job.received[1][-1] == MemberLeft(1, 2, "was killed by SIGKILL")
    job.ready(1, step=7, whole=True)
    assert job.generation == Generation(2, (1,), (1,), 7, fresh=False)
    job.form()
    assert len(job.coordinator.outages_s) == 1  # one long one


def test_a_member_that_leaves_by_itself_ends_the_generation_for_all() -> None:
    job = Job().found()
    job.ready(1, step=7, whole=True)
    assert job.received[0][-1] == MemberLeft(0, 1, "has left it")
    job.ready(0, 2, step=7, whole=True)
    assert job.generation.members == (0, 1, 2)
    assert job.coordinator.losses == []


def test_a_loss_while_members_regroup_is_told_to_those_who_have_not_left() -> None:
    job = Job(minimum=1, maximum=4).found(0, 1, 2, 3)
    job.exit(3)
    job.ready(0, 1, 2, step=3, whole=True)
    job.form()
    job.ready(4, was=NEVER)
    job.ready(0, step=5, whole=True)
    job.exit(1)
    assert job.received[2][-2:] == [MemberLeft(1, 0, "has left it"), MemberLeft(1, 1, "was killed by SIGKILL")]
    job.ready(2, step=4, whole=True)
    assert job.generation == Generation(2, (0, 2, 4), (0,), 5, fresh=False)


def test_one_that_does_not_follow_when_others_regroup_is_told() -> None:
    job = Job(minimum=1, maximum=2).found()
    job.exit(1)
    job.ready(0, step=1, whole=True)
    job.form()
    job.ready(2, was=NEVER)
    job.ready(0, step=2, whole=True)
    job.form()
    job.exit(2)
    job.ready(0, step=2, whole=True)
    job.form()
    assert job.generation.members == (0,)
    job = Job(minimum=1, maximum=3).found()
    job.exit(2)
    job.ready(0, 1, step=1, whole=True)
    job.form()
    job.ready(3, was=NEVER)
    job.ready(0, step=2, whole=True)
    job.tick(REGROUP_S + 1)
    assert job.received[1][-1] == MemberLeft(1, 0, "has left it")


def test_when_all_are_lost_the_checkpoint_has_to_do() -> None:
    job = Job(minimum=1, maximum=2, patience_s=10.0).found()
    job.exit(0)
    job.exit(1)
    job.ready(2, was=NEVER)
    assert job.coordinator.stage is Stage.GATHERING  # as at the beginning, the others are waited for
    job.ready(3, was=NEVER)
    assert job.generation == Generation(1, (2, 3), (), NEVER, fresh=False)


def test_torn_members_alone_have_no_source() -> None:
    job = Job().found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=False)
    assert job.generation.sources == ()


# ----------------------------------------------------------------------------------------------------------- giving up


def test_too_many_losses() -> None:
    job = Job(minimum=1, max_losses=1).found()
    job.exit(0)
    assert GiveUp("2 ranks are lost, and at most 1 may be") in job.exit(1)
    assert job.coordinator.stage is Stage.OVER
    assert job.tick(1) == []


def test_below_the_minimum_it_waits_says_for_what_and_gives_up() -> None:
    job = Job(minimum=2, maximum=2, recovery_s=60.0).found()
    job.exit(1)
    job.ready(0, step=3, whole=True)
    job.tick(1)
    text = "1 rank is left of at least 2: waiting for 1 to start, for at most 60 s"
    assert job.of(Waiting) == [Waiting(text)]
    job.tick(58)
    assert job.coordinator.stage is Stage.GATHERING
    job.tick(3)
    assert job.of(GiveUp) == [
        GiveUp("1 rank is there of at least 2, for longer than 60 s; 1 did not start in that time")
    ]


def test_a_batch_that_raises_on_whoever_has_it_is_tried_twice() -> None:
    job = Job(minimum=1).found()
    loss = Loss(1, 1, 1, 7, "raised ValueError: bad sample 3")
    assert Lost(loss) in job.say(1, MemberFailed(0, 7, "ValueError: bad sample 3"))
    job.exit(1, Departure("exited with code 1", 7))
    assert job.coordinator.losses == [Loss(1, 1, 1, 7, "raised ValueError: bad sample 3")]
    job.ready(0, 2, step=7, whole=True)
    job.form()
    *_, action = job.say(0, MemberFailed(1, 7, "ValueError: bad sample 4"))
    assert isinstance(action, GiveUp) and action.final
    assert action.reason.startswith("step 7 has failed in two generations")


def test_a_generation_that_two_times_cannot_be_formed_may_be_begun_anew() -> None:
    job = Job(minimum=1, maximum=4).found()
    job.exit(3, KILLED)
    for victim in (2, 1):
        job.ready(*range(victim + 1), step=7, whole=True)
        assert job.coordinator.stage is Stage.FORMING
        job.exit(victim, Departure("raised WorldNotFormed: no", 7))
    (action,) = job.of(GiveUp)
    assert isinstance(action, GiveUp) and not action.final


def test_a_step_that_all_want_to_make_again_is_made_again_once() -> None:
    job = Job(minimum=1).found()
    damaged = MemberReady(0, 7, True, "raised MessageDamaged: bucket 1")
    assert [job.say(member, damaged) for member in (0, 1)] == [
        [Tell(other, MemberLeft(0, member, damaged.reason)) for other in others]
        for member, others in ((0, (1, 2)), (1, (2,)))
    ]
    job.say(2, damaged)
    assert job.generation.members == (0, 1, 2)
    assert not job.coordinator.losses
    job.form()
    *_, action = job.say(2, dataclasses.replace(damaged, was=1))
    assert isinstance(action, GiveUp) and action.final
    assert action.reason.startswith("step 7 has failed in two generations")
    assert action.reason.endswith("a rank raised MessageDamaged: bucket 1")


def test_all_that_fail_at_once_are_one_try() -> None:
    job = Job(minimum=1).found()
    for member in (0, 1, 2):
        assert not any(isinstance(action, GiveUp) for action in job.say(member, MemberFailed(0, 7, "OSError: gone")))
    assert job.coordinator.stage is Stage.GATHERING


def test_another_step_and_another_error_are_tried_again() -> None:
    retries = Retries()
    assert not retries.is_hopeless(0, 7, "ValueError: a")
    assert not retries.is_hopeless(1, 8, "ValueError: a")
    assert not retries.is_hopeless(1, 7, "KeyError: a")
    assert not retries.is_hopeless(0, 7, "ValueError: b")
    assert retries.is_hopeless(2, 7, "ValueError: b")


def test_a_crash_at_one_step_is_tried_twice_and_a_kill_for_ever() -> None:
    for how, over in ((CRASHED, True), (KILLED, False)):
        job = Job(minimum=1, maximum=4).found()
        for victim in (3, 2):
            job.exit(victim, how)
            job.ready(*range(victim), step=7, whole=True)
            if job.coordinator.stage is Stage.FORMING:
                job.form()
        assert (job.coordinator.stage is Stage.OVER) == over


def test_processes_that_never_come_to_the_job_are_not_started_for_ever() -> None:
    job = Job(minimum=1, maximum=2).found()
    job.exit(1)
    job.ready(0, step=3, whole=True)
    job.form()
    for _ in range(STILLBORN):
        newest = max(job.slots)
        job.exit(newest, Departure("exited with code 1", NEVER))
    assert max(job.slots) == 0
    assert job.coordinator.stage is Stage.WORKING
    assert isinstance(job.done[-1], Waiting)
    assert "ended before they could join" in job.done[-1].text
    job.exit(0)
    assert isinstance(job.done[-1], GiveUp)


def test_a_generation_that_is_never_formed() -> None:
    job = Job(recovery_s=60.0)
    job.ready(0, 1, 2)
    job.say(0, MemberFormed(0))
    job.tick(61)
    assert job.of(GiveUp) == [GiveUp("generation 0 was not formed within 60 s; missing: ranks 1-2")]


def test_one_that_has_failed_and_does_not_end_is_ended() -> None:
    job = Job(minimum=1, patience_s=5.0).found()
    job.say(1, MemberFailed(0, 7, "ValueError: no"))
    assert job.received[0][-1] == MemberLeft(0, 1, "raised ValueError: no")
    assert EndMember(1) in job.tick(6)
    assert EndMember(1) not in job.tick(6)


def test_one_that_has_caught_its_error_is_a_member_again() -> None:
    job = Job(minimum=1).found()
    job.say(1, MemberFailed(0, 7, "ValueError: no"))
    job.ready(0, 1, 2, step=7, whole=True)
    assert job.generation.members == (0, 1, 2)


def test_a_survivor_that_takes_long_is_waited_for_and_named() -> None:
    job = Job().found()
    job.exit(0)
    job.ready(1, step=3, whole=True)
    job.tick(SAY_AFTER_S + 1)
    job.tick(1)
    (said,) = job.of(Waiting)
    assert isinstance(said, Waiting) and "waits for rank 2" in said.text
    assert job.coordinator.awaited == {2}


# ------------------------------------------------------------------------------------------------------------- nonsense


def test_what_comes_late_or_from_strangers_changes_nothing() -> None:
    job = Job().found()
    for message in (MemberFormed(7), MemberStore(7, 1), MemberFinished(7, 1), MemberFailed(7, 1, "x")):
        assert job.say(0, message) == []
        assert job.say(99, message) == []
    assert job.say(0, MemberReady(NEVER, 0, False)) == []
    assert job.say(1, MemberStore(0, 1)) == []
    job.exit(2)
    assert job.take(job.coordinator.exited(2, KILLED, job.now)) == []
    assert job.coordinator.stage is Stage.GATHERING


def test_moves_that_are_not_legal_are_refused() -> None:
    for stage, allowed in LEGAL.items():
        for to in set(Stage) - allowed:
            job = Job()
            job.coordinator.stage = stage
            with pytest.raises(IllegalMove):
                job.coordinator._go(to)


@pytest.mark.parametrize(("minimum", "maximum"), [(3, 2), (0, 2)])
def test_a_minimum_above_the_maximum_is_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(UsageError, match=f"minimum of {minimum} and a maximum of {maximum}"):
        ElasticTerms(minimum=minimum, maximum=maximum)


Move = Callable[[Job, int], None]


def _ready(job: Job, member: int) -> None:
    """As a member does: only when its generation is over, or it was asked to regroup, or it is in none."""
    received = job.received[member]
    mine = [message for message in received if isinstance(message, Generation)]
    last = mine[-1] if mine else None
    done = last is None or any(
        isinstance(message, MemberLeft | Regroup) and message.generation == last.number for message in received
    )
    if done or member % 5 == 0:  # some leave for reasons of their own
        job.say(member, MemberReady(NEVER if last is None else last.number, len(received) // 3, last is not None))


def _formed(job: Job, member: int) -> None:
    mine = [message for message in job.received[member] if isinstance(message, Generation)]
    if mine:
        job.say(member, MemberStore(mine[-1].number, 1))
        job.say(member, MemberFormed(mine[-1].number))


def _failed(job: Job, member: int) -> None:
    job.say(member, MemberFailed(job.number, len(job.done), "ValueError"))


def _killed(job: Job, member: int) -> None:
    job.exit(member)


def _crashed(job: Job, member: int) -> None:
    job.exit(member, Departure("was killed by SIGSEGV", len(job.done)))


def _time(job: Job, member: int) -> None:
    job.tick(float(member + 1))


def _stopped(job: Job, member: int) -> None:
    if member > 20:  # seldom
        job.take(job.coordinator.stop(job.now))


def _nonsense(job: Job, member: int) -> None:
    job.say(member, MemberStore(member, 1))
    job.say(member, MemberReady(member - 2, member, True))
    job.say(member + 1, MemberFormed(member))


MOVES = (_ready, _ready, _ready, _formed, _formed, _killed, _crashed, _failed, _time, _nonsense, _stopped)


@settings(max_examples=300)
@given(
    minimum=st.integers(1, 3),
    more=st.integers(0, 2),
    spares=st.integers(0, 2),
    moves=st.lists(
        st.tuples(
            st.sampled_from(MOVES),
            st.integers(0, 30),
        ),
        max_size=60,
    ),
)
def test_whatever_happens(minimum: int, more: int, spares: int, moves: list[tuple[Move, int]]) -> None:
    job = Job(minimum, minimum + more, spares=spares, recovery_s=50.0, patience_s=5.0)
    for move, number in moves:
        if not job.slots or job.coordinator.stage is Stage.OVER:
            break
        before, number_before = len(job.done), job.number
        move(job, sorted(job.slots)[number % len(job.slots)])
        told = [action for action in job.done[before:] if isinstance(action, Tell)]
        fresh = {action.message for action in told if isinstance(action.message, Generation)}
        assert len(fresh) <= 1
        if job.number == number_before:
            assert not fresh
            continue
        # One more, of living members alone, neither too few nor too many, and none of whom is in another.
        generation = job.generation
        assert fresh == {generation} and generation.number == number_before + 1
        assert set(generation.members) <= set(job.slots)
        assert (1 if job.coordinator._stopping else minimum) <= generation.size <= minimum + more
        assert {action.member for action in told} >= set(generation.members)
        assert set(generation.sources) <= set(generation.members)
    check_that_it_ends(job)


def check_that_it_ends(job: Job) -> None:
    """From anywhere, when members do as they are told, the job works again or is given up."""
    for _ in range(200):
        if job.coordinator.stage in (Stage.WORKING, Stage.OVER):
            break
        for member in sorted(job.slots):
            received = job.received[member]
            mine = [message for message in received if isinstance(message, Generation)]
            _formed(job, member)
            over = not mine or mine[-1] is not job.coordinator.generation or job.coordinator.stage is Stage.GATHERING
            if over and job.coordinator.stage in (Stage.FOUNDING, Stage.GATHERING) and member in job.slots:
                job.say(member, MemberReady(mine[-1].number if mine else NEVER, 0, bool(mine)))
        job.tick(3.0)
    assert job.coordinator.stage in (Stage.WORKING, Stage.OVER)
    if job.coordinator._stopping and not job.of(GiveUp):
        for member, living in job.coordinator._living.items():
            told = any(isinstance(message, Refused) for message in job.received[member])
            assert living.ready is None or told, "nobody waits for a generation that never comes"
    else:
        assert (job.coordinator.stage is Stage.OVER) == bool(job.of(GiveUp))
    assert len(job.of(Lost)) == len(job.coordinator.losses)
