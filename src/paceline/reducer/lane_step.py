"""The moves of a reducer whose gradients come in lanes: a step begins, a lane is full, a lane has nothing."""

from typing import TYPE_CHECKING

import torch

from paceline.errors import BackwardAborted, UsageError
from paceline.reducer.agreement import Mode
from paceline.reducer.lanes import Lanes, LaneState, late_gradient
from paceline.reducer.turn import Part

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


def begin(reducer: "Reducer") -> str | None:
    """A step of lanes begins. Returns the name of a parameter that has a gradient already, if there is one.

    If the step before was given up half-way, the other ranks wait for its reduction: it is completed without
    gradients, and they are told.
    """
    lanes = _lanes_of(reducer)
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            reducer.abandon()
        if lanes.under_way:
            _give_up(reducer)
        reducer.relay_now()  # on all ranks in the same step, whatever their first lanes do
        stale = reducer.set.first_with_gradient()
        if stale is None:
            reducer.set.drop_gradients()
        return stale


def check_open(reducer: "Reducer") -> None:
    """A backward begins: it has to be the one of the lane that runs."""
    lanes = _lanes_of(reducer)
    if lanes.state is LaneState.CLOSED:
        raise UsageError(
            f"lane {lanes.current} has had its backward already; run all but the last backward of a lane inside "
            f"model.no_sync()"
        )
    if lanes.state is LaneState.NONE:
        raise UsageError(
            f"this replica trains in {lanes.count} lanes, and no lane runs; call backward inside "
            f"`for batch in model.lanes(micros, step):`"
        )


def close(reducer: "Reducer") -> None:
    """A lane's gradients are in: keep them for this rank's other lanes or, after the last of them, reduce."""
    lanes = _lanes_of(reducer)
    weight = reducer.weighting.of_lane()
    skipped = reducer.turn.part is Part.SKIPPED
    lanes.close(0.0 if skipped else weight, plain=not skipped and reducer.weighting.last is not Mode.WEIGHTED)
    if lanes.last:
        reducer.finish()
        return
    reducer.backwards.close()
    reducer.fill_up()
    if reducer.turn.late:
        raise late_gradient(reducer.set.slots)
    reducer.set.fold(lanes)
    reducer.turn.part = Part.WHOLE
    if reducer.on_finished is not None:
        reducer.on_finished()


def skip(reducer: "Reducer") -> None:
    """The lane that runs has nothing that counts."""
    lanes = _lanes_of(reducer)
    with reducer.lock, torch.no_grad():
        if reducer.backwards.failed():
            lane = lanes.current
            reducer.abandon()
            if lanes.under_way:
                _give_up(reducer)
            raise BackwardAborted(
                f"the backward of lane {lane} ended with an exception, so this step has no gradients on any rank; "
                f"catch it outside the loop over lanes, and go on with the next step",
                ranks=[reducer.transport.rank],
            )
        reducer.prepare()
        reducer.set.drop_gradients()
        reducer.set.begin_lane()  # an earlier micro of this lane may have left something
        reducer.turn.part = Part.SKIPPED
        _close_without_backward(reducer)


def sync(reducer: "Reducer") -> None:
    """Close the lane that runs with what its micros have accumulated, without another backward."""
    lanes = _lanes_of(reducer)
    with reducer.lock, torch.no_grad():
        if lanes.state is not LaneState.OPEN:
            return
        reducer.prepare()
        _close_without_backward(reducer)


def _close_without_backward(reducer: "Reducer") -> None:
    if _lanes_of(reducer).last:
        reducer.begin_reduction()
    close(reducer)


def _give_up(reducer: "Reducer") -> None:
    """Complete the reduction of a step that was left half-way, and tell the other ranks."""
    _lanes_of(reducer).give_up()
    reducer.prepare()
    reducer.begin_reduction()
    reducer.abort()


def _lanes_of(reducer: "Reducer") -> Lanes:
    assert reducer.lanes is not None
    return reducer.lanes
