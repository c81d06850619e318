"""What a step has had so far: when the state of a rank is one that a completed update has left."""

from paceline.reducer.ledger import StepLedger


def test_a_rank_in_the_middle_of_an_update_is_not_whole() -> None:
    ledger = StepLedger()
    ledger.reduced()
    ledger.begin_update(1)
    ledger.begin_update(2)  # one optimizer may step inside another's step
    assert not ledger.whole
    ledger.end_update(2)
    assert not ledger.whole
    ledger.end_update(1)
    assert ledger.whole
    assert ledger.commits == 2


def test_a_rank_that_took_the_state_of_another_is_whole_again() -> None:
    ledger = StepLedger()
    ledger.reduced()
    ledger.begin_update(1)
    ledger.took(7)
    assert ledger.whole
    assert ledger.commits == 7


def test_an_update_that_the_others_have_not_made_sets_a_rank_apart() -> None:
    ledger = StepLedger()
    ledger.reduced()
    for _ in range(2):
        ledger.begin_update(1)
        ledger.end_update(1)
    assert not ledger.whole
