"""What a step has had so far: when the state of a rank is one that a completed update has left."""

from paceline.reducer.step import StepState


def test_a_rank_in_the_middle_of_an_update_is_not_whole() -> None:
    step_state = StepState()
    step_state.reduced()
    step_state.begin_update(1)
    step_state.begin_update(2)  # one optimizer may step inside another's step
    assert not step_state.whole
    step_state.end_update(2)
    assert not step_state.whole
    step_state.end_update(1)
    assert step_state.whole
    assert step_state.commits == 2


def test_a_rank_that_took_the_state_of_another_is_whole_again() -> None:
    step_state = StepState()
    step_state.reduced()
    step_state.begin_update(1)
    step_state.took(7)
    assert step_state.whole
    assert step_state.commits == 7


def test_an_update_that_the_others_have_not_made_sets_a_rank_apart() -> None:
    step_state = StepState()
    step_state.reduced()
    for _ in range(2):
        step_state.begin_update(1)
        step_state.end_update(1)
    assert not step_state.whole
