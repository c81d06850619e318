"""Where a rank stands in a step, and which moves it may make."""

import pytest

from paceline.elastic.transaction import StepMark, Transaction
from paceline.errors import IllegalMove


def begun(step: int = 4) -> Transaction:
    transaction = Transaction()
    transaction.take(step)
    return transaction


def test_a_step_is_counted_when_its_update_has_ended() -> None:
    transaction = begun()
    transaction.begin_attempt()
    transaction.begin_update()
    assert (transaction.step, transaction.whole) == (4, False)
    transaction.end_update()
    assert (transaction.step, transaction.whole) == (5, True)
    transaction.end_attempt()
    assert transaction.mark is StepMark.WHOLE


def test_an_attempt_without_an_update_changes_no_step() -> None:
    transaction = begun()
    transaction.begin_attempt()
    transaction.end_attempt()
    assert (transaction.step, transaction.mark) == (4, StepMark.WHOLE)


def test_an_attempt_that_fails_before_the_update_leaves_the_state_whole() -> None:
    transaction = begun()
    transaction.begin_attempt()
    assert transaction.whole
    transaction.drop()
    assert (transaction.step, transaction.whole) == (4, True)


def test_an_attempt_that_fails_after_the_update_keeps_it() -> None:
    transaction = begun()
    transaction.begin_attempt()
    transaction.begin_update()
    transaction.end_update()
    transaction.drop()
    assert (transaction.step, transaction.whole) == (5, True)


def test_a_failure_inside_the_update_tears_the_state_until_another_is_taken() -> None:
    transaction = begun()
    transaction.begin_attempt()
    transaction.begin_update()
    transaction.drop()
    assert (transaction.mark, transaction.whole) == (StepMark.TORN, False)
    transaction.drop()
    assert transaction.mark is StepMark.TORN
    with pytest.raises(IllegalMove, match="got torn"):
        transaction.begin_attempt()
    transaction.take(9)
    assert (transaction.step, transaction.whole) == (9, True)


def test_a_rank_that_has_just_started_has_nothing_to_give() -> None:
    transaction = Transaction()
    assert not transaction.whole
    with pytest.raises(IllegalMove, match="got new"):
        transaction.begin_attempt()
    with pytest.raises(IllegalMove, match="got new"):
        transaction.drop()


def test_moves_out_of_order_are_refused() -> None:
    transaction = begun()
    with pytest.raises(IllegalMove, match="outside an attempt"):
        transaction.begin_update()
    transaction.begin_attempt()
    with pytest.raises(IllegalMove, match="inside an attempt of step 4"):
        transaction.begin_attempt()
    with pytest.raises(IllegalMove, match="taking the state"):
        transaction.take(5)
    transaction.begin_update()
    with pytest.raises(IllegalMove, match="got updating"):
        transaction.begin_update()
    with pytest.raises(IllegalMove, match="the end of attempt"):
        transaction.end_attempt()
    transaction.end_update()
    with pytest.raises(IllegalMove, match="twice in one"):
        transaction.begin_update()
