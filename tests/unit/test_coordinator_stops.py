"""An elastic job that is asked to end: the ranks that it has may meet once more, to save and leave together."""

import dataclasses

import pytest

from paceline.launch.coordinator import NOTHING_WHOLE, STOPPING
from paceline.launch.elastic_actions import Action, Departure, Formed, GiveUp, Lost, Spawn, Tell
from paceline.launch.stage import Stage
from paceline.member_messages import NEVER, Generation, MemberFailed, MemberFinished, MemberReady, Refused, Regroup
from tests.unit.test_coordinator import CRASHED, KILLED, Job, Pairs

OBEYED = Departure("was killed by SIGTERM", 7, from_outside=True, asked=True)


def stop(job: Job) -> list[Action]:
    return job.take(job.coordinator.stop(job.now))


def started(job: Job) -> int:
    return len(job.of(Spawn))


def test_survivors_that_gather_meet_and_nobody_is_started() -> None:
    job = Job(minimum=2, maximum=3).found()
    job.exit(0)
    job.ready(1, step=7, whole=True)
    assert stop(job) == []
    before = started(job)
    job.ready(2, step=7, whole=True)
    assert job.generation == Generation(1, (1, 2), (1,), 7, fresh=False)
    job.form()
    job.exit(3, OBEYED)
    assert started(job) == before
    assert [loss.member for loss in job.coordinator.losses] == [0]
    job.say(1, MemberFinished(1, 8))
    assert job.coordinator.stage is Stage.FINISHING


def test_below_the_minimum_those_that_are_left_meet() -> None:
    job = Job(minimum=3, maximum=3).found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=True)
    assert job.coordinator.stage is Stage.GATHERING
    stop(job)
    assert job.generation == Generation(1, (1, 2), (1,), 7, fresh=False)
    job.form()
    assert isinstance(job.done[-1], Formed)


def test_those_that_form_a_generation_go_on_and_form_another_when_one_dies() -> None:
    job = Job(minimum=2, maximum=3).found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=True)
    assert job.coordinator.stage is Stage.FORMING
    stop(job)
    job.exit(2)
    job.ready(1, step=7, whole=True)
    assert job.generation == Generation(2, (1,), (1,), 7, fresh=False)


@pytest.mark.parametrize("working", [True, False])
def test_those_that_wait_to_join_are_refused_at_once(working: bool) -> None:
    job = Job(minimum=1, maximum=3, spares=1).found()
    job.ready(3, was=NEVER)
    job.exit(0)
    job.ready(1, step=7, whole=True)
    if working:
        job.ready(2, step=7, whole=True)
        assert job.generation.members == (1, 2, 3)
        job.form()
    waits = 4
    job.ready(waits, was=NEVER)
    assert Tell(waits, Refused(STOPPING)) in stop(job)
    if not working:
        job.ready(2, step=7, whole=True)
        assert job.generation.members == (1, 2)


def test_one_that_comes_later_is_refused_and_nobody_regroups_for_it() -> None:
    job = Job(minimum=1, maximum=3).found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=True)
    job.form()
    stop(job)
    assert job.say(3, MemberReady(NEVER, 0, False)) == [Tell(3, Refused(STOPPING))]
    assert not any(isinstance(message, Regroup) for message in job.received[1])


def test_if_none_that_is_left_has_a_whole_state_they_are_told_at_once() -> None:
    job = Job(minimum=3, maximum=3).found()
    job.exit(0)
    job.ready(1, 2, step=7, whole=False)
    assert stop(job) == [Tell(1, Refused(NOTHING_WHOLE)), Tell(2, Refused(NOTHING_WHOLE))]
    assert job.coordinator.stage is Stage.OVER


def test_those_that_leave_by_the_signal_are_no_losses_and_a_crash_is_one() -> None:
    job = Job(minimum=1, maximum=3, max_losses=0).found()
    stop(job)
    job.exit(0, OBEYED)
    assert not job.coordinator.losses
    job.exit(1, CRASHED)
    assert [type(action) for action in job.done if isinstance(action, Lost | GiveUp)] == [Lost]
    job.ready(2, step=7, whole=True)
    assert job.generation.members == (2,)
    job.exit(2, OBEYED)
    assert job.coordinator.stage is Stage.OVER
    assert len(job.coordinator.losses) == 1


def test_before_the_first_generation_all_are_refused_now_and_later() -> None:
    job = Job(minimum=2, maximum=2)
    job.ready(0)
    assert stop(job) == [Tell(0, Refused(STOPPING))]
    assert job.say(1, MemberReady(NEVER, 0, False)) == [Tell(1, Refused(STOPPING))]
    assert stop(job) == []


def test_after_the_last_barrier_nothing_is_said() -> None:
    job = Job(minimum=1, maximum=2).found()
    job.say(0, MemberFinished(0, 9))
    assert stop(job) == []


def test_shards_meet_in_a_world_that_they_can_work_in() -> None:
    job = Pairs(4, 4).found()
    job.exit(0)
    stop(job)
    job.ready(1, 2, 3, step=7, whole=True)
    assert job.generation.members == (2, 1)
    assert job.received[3][-1] == Refused(STOPPING)


def test_one_that_has_failed_and_goes_on_is_refused() -> None:
    job = Job(minimum=1, maximum=2).found()
    stop(job)
    job.say(1, MemberFailed(0, 7, "ValueError: no"))
    assert job.say(1, MemberReady(0, 7, True)) == [Tell(1, Refused(STOPPING))]
    job.ready(0, step=7, whole=True)
    assert job.generation.members == (0,)


def test_an_ordinary_loss_is_one_also_while_it_stops() -> None:
    job = Job(minimum=1, maximum=2).found()
    stop(job)
    assert isinstance(job.exit(0, dataclasses.replace(KILLED, asked=False))[0], Lost)
