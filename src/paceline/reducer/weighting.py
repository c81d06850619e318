"""Weighted microbatches are visible between backwards, so that zero_grad() can drop them, and held during them:
autograd would add to them without a weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.reducer.bucket import GradSlot
from paceline.reducer.participation import abandon
from paceline.reducer.report import Mode
from paceline.reducer.unreduced import (
    drop_all,
    first_with_gradient,
    has_foreign,
    hold_all,
    is_empty,
    is_thrown_away,
    show_all,
)

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


@contextmanager
def weighted(reducer: "Reducer", weight: float) -> Iterator[None]:
    """Backwards inside have the weight `weight`."""
    weighting = reducer.weighting
    if weighting.current is None and (stale := _hold_weighted(reducer)) is not None:
        raise UsageError(
            f"weight() needs a step that starts from empty gradients, but {stale} already has one that did not come "
            f"from a weighted microbatch; call optimizer.zero_grad() before the first microbatch, and put every "
            f"microbatch inside weight()"
        )
    before, weighting.current = weighting.current, weight
    try:
        yield
    finally:
        weighting.current = before
        if before is None:
            show_all(reducer.bucket_set)  # so that zero_grad() can drop them


def _hold_weighted(reducer: "Reducer") -> str | None:
    """Hold what earlier microbatches of this step have left, so that autograd does not add to it unweighted.

    Returns the name of a parameter whose gradient did not come from a weighted microbatch of this step, if any.
    """
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            abandon(reducer)
        reducer.prepare()
        if (
            reducer.weighting.mode is Mode.WEIGHTED
            and not is_thrown_away(reducer.bucket_set)
            and hold_all(reducer.bucket_set)
        ):
            return None
        stale = first_with_gradient(reducer.bucket_set)
        if stale is None and reducer.backwards.current is None and not reducer.batch.has_lanes:
            drop_all(reducer.bucket_set)
            reducer.reset()  # what an earlier microbatch has left was dropped by zero_grad()
        return stale


def resume_step(reducer: "Reducer") -> None:
    """A backward begins after other microbatches of the step. What zero_grad() has dropped of them no longer counts,
    and what is left of weighted ones is held, since autograd would add to it unweighted."""
    if not reducer.batch.resumes:
        return  # a lane begins with empty gradients
    weighted = reducer.weighting.mode is not Mode.PLAIN
    if is_empty(reducer.bucket_set) or (weighted and is_thrown_away(reducer.bucket_set)):
        drop_all(reducer.bucket_set)
        for slot in reducer.bucket_set.slots:
            slot.clear_backward() if reducer.batch.has_lanes else slot.clear()  # earlier lanes have used what they have
        reducer.weighting.reset()
    elif reducer.weighting.current is not None:
        if has_foreign(reducer.bucket_set):
            raise UsageError(
                "a gradient was replaced between two microbatches inside weight(), so its weight is not known; change "
                "gradients in place there, or replace them after the last backward of the step"
            )
        hold_all(reducer.bucket_set)


def check_unweighted(slot: GradSlot) -> None:
    """A backward begins with the gradient of a parameter, and not in the replica's forward, where it could be
    noticed."""
    if slot.attached():
        raise UsageError(
            f"inside weight() a backward added to the gradient of {slot.meta.name} before it reached an output of the "
            f"replica, so earlier microbatches and this one cannot be told apart; call the replica itself there, and "
            f"use its parameters nowhere else"
        )
