"""How a rank takes part in a reduction without a successful backward of its own."""

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import torch

from paceline.errors import BackwardAborted, IllegalMove, PacelineError
from paceline.reducer.autograd import pending_reducers
from paceline.reducer.report import Abort, StepRole
from paceline.reducer.unreduced import claim_by_hand, drop_all, is_thrown_away, lend_all

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


TWO_THREADS = (
    "two threads have run a backward of one replica at the same time, so their gradients cannot be told apart; run "
    "them one after another, or add the losses and run one backward"
)


def reduce_now(reducer: "Reducer", *, by_hand: bool = False) -> None:
    """Reduce what has been accumulated so far, without another backward. `by_hand`: also gradients that were
    assigned."""
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            abandon(reducer)
            raise IllegalMove("the last backward ended with an exception, so there are no gradients to reduce")
        if reducer.backwards.current is not None:
            raise IllegalMove("gradients cannot be reduced while a backward runs; do it after loss.backward()")
        reducer.apply_pending_layout()
        if not reducer.is_alone():
            reducer.prepare()
        reducer.bucket_set.begin_backward()
        if by_hand:
            claim_by_hand(reducer.bucket_set)
        reducer.begin_reduction()
        reducer.finish()


def skip(reducer: "Reducer") -> None:
    """Take part in the reduction of this step with what earlier microbatches have left, if anything."""
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            told = reducer.backwards.current is not None and reducer.backwards.current.reduces
            abandon(reducer)
            if told:  # the reduction of this step is over, without gradients on any rank
                return
        if reducer.is_alone() or (reducer.weighting.microbatches and not is_thrown_away(reducer.bucket_set)):
            reduce_now(reducer)
        else:
            reducer.weighting.reset()
            _take_part_with_nothing(reducer, StepRole.SKIPPED)


def shadow(reducer: "Reducer") -> None:
    """Take part in a reduction with zeros, and keep this rank's gradients: a rank without data inside join()."""
    with reducer.lock, torch.no_grad():
        _take_part_with_nothing(reducer, StepRole.EMPTY)


def _take_part_with_nothing(reducer: "Reducer", role: StepRole) -> None:
    reducer.apply_pending_layout()
    reducer.prepare()
    reducer.bucket_set.begin_backward()
    reducer.begin_reduction(role)
    lend_all(reducer.bucket_set)
    reducer.finish()


def abandon(reducer: "Reducer", why: Abort = Abort.EXCEPTION) -> None:
    """Forget a backward that ended with an exception, and be ready for the next one.

    If it was to be reduced, the other ranks wait for it: its reduction is completed without gradients, and they are
    told. What earlier backwards have accumulated stays, if this one was only to add to it.
    """
    with reducer.lock, torch.no_grad():
        backward = reducer.backwards.close()
        if backward is not None and reducer.batch.abandon(backward, why):
            return
        if backward is None or not backward.reduces:
            reducer.bucket_set.forget_arrived()
            return
        for call in reducer.callbacks.failed:
            call()
        if backward.alone and not reducer.hooks:  # as with the bare module, its gradients stay
            reducer.step_state.closed()
            return
        if reducer.schedule.broken:  # collectives would not match those of other ranks; the watch reports it
            reducer.reset()
            return
        if not backward.delivered:
            reducer.begin_reduction()
        abort(reducer, why)
        for other in pending_reducers.called(reducer):
            _leave(other)


def fail_in_two_threads(reducer: "Reducer") -> NoReturn:
    """A backward that overlapped with another has ended: no rank has gradients of it, and this rank raises the
    reason."""
    abandon(reducer, Abort.THREADS)
    raise BackwardAborted(TWO_THREADS, ranks=[reducer.transport.rank])


def abort(reducer: "Reducer", why: Abort = Abort.EXCEPTION) -> None:
    """Complete a reduction that the others wait for, without gradients."""
    drop_all(reducer.bucket_set)
    reducer.contribution.mark_aborted(why)
    reducer.finish()


def discard_in_flight(reducer: "Reducer") -> None:
    """The process group has ended. Forget the backward and the gradients that are under way, without telling the other
    ranks: `abandon` would complete the reduction that they wait for, over a transport that no longer exists."""
    with reducer.lock, torch.no_grad():
        reducer.backwards.close()
        drop_all(reducer.bucket_set)
        reducer.after_backward.clear()
        reducer.reset()
        reducer.step_state.discarded()


def _leave(reducer: "Reducer") -> None:
    """A backward on this thread has failed in another replica. If this one had a forward whose backward the others wait
    for, it was most likely the same one: tell them that it will not come.

    A replica that is called in every step and never reduced, such as a teacher, is not waited for.
    """
    with reducer.lock, torch.no_grad():
        pending = reducer.step_state.forwards_pending
        waited_for = pending == 1 or (pending and reducer.reductions_begun)
        if reducer.backwards.failed():
            abandon(reducer)
        elif waited_for and not reducer.batch.has_lanes and not reducer.backwards.running() and not reducer.is_alone():
            reducer.prepare()
            reducer.begin_reduction()
            abort(reducer)


def discard_others(reducer: "Reducer") -> None:
    """The end of a backward has raised, so autograd no longer calls the other replicas in it; but the other ranks wait
    for them."""
    for other in pending_reducers.others(reducer):
        receive_and_discard(other)


def receive_and_discard(reducer: "Reducer") -> None:
    """This replica has sent, and another one of the same backward has raised before this one could receive: do so now,
    and drop the gradients of that backward. Its caller has already got the error."""
    with reducer.lock, torch.no_grad():
        with suppress(PacelineError):
            reducer.receive()
        drop_all(reducer.bucket_set)
