"""The moves of a reducer whose gradients come in lanes: a step begins, a lane is full, has nothing, or has failed."""

from typing import TYPE_CHECKING

import torch

from paceline.errors import BackwardAborted, UsageError
from paceline.reducer.backward import Backward
from paceline.reducer.lanes import Lanes, LaneState, late_gradient
from paceline.reducer.report import Mode
from paceline.reducer.turn import Part, abort

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
        if lanes.under_way or lanes.owed:
            _give_up(reducer)
        lanes.failed = None
        reducer.dropped = True  # until the reduction of this step is settled
        reducer.relay_now()  # on all ranks in the same step, whatever their first lanes do
        stale = reducer.set.first_with_gradient()
        if stale is None:
            reducer.set.drop_gradients()
        return stale


def owe(reducer: "Reducer", step: int) -> None:
    """Step `step` has begun, and none of its lanes will run here: `begin` of the next one tells the others."""
    lanes = _lanes_of(reducer)
    lanes.step, lanes.owed = step, True


def check_open(reducer: "Reducer") -> None:
    """A backward begins: it has to be one of the lane that runs."""
    lanes = _lanes_of(reducer)
    _check_not_failed(reducer)
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
    lanes.backwards += 1


def close(reducer: "Reducer") -> bool:
    """A lane's gradients are in: keep them for this rank's other lanes. Returns True after the last of them, when the
    step is to be reduced."""
    lanes = _lanes_of(reducer)
    weight = reducer.weighting.of_lane()
    skipped = reducer.turn.part is Part.SKIPPED
    lanes.close(0.0 if skipped else weight, plain=not skipped and reducer.weighting.last is not Mode.WEIGHTED)
    if lanes.last:
        return True
    reducer.backwards.close()
    reducer.fill_up()
    if reducer.turn.late:
        raise late_gradient(reducer.set.slots)
    reducer.set.fold(lanes, reducer.scale)
    reducer.turn.part = Part.WHOLE
    if reducer.on_finished is not None:
        reducer.on_finished()
    return False


def skip(reducer: "Reducer") -> None:
    """The lane that runs has nothing that counts."""
    lanes = _lanes_of(reducer)
    with reducer.lock, torch.no_grad():
        _hear_of_failure(reducer)
        if lanes.state is not LaneState.OPEN:
            ran = f"lane {lanes.current} of step {lanes.step} has had its backward already"
            raise UsageError(
                f"skip_batch() is for the lane that runs, and {'no lane runs' if not lanes.under_way else ran}; call "
                f"it in the loop over model.lanes(), instead of the lane's last backward"
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
        if not reducer.sync_on:
            return
        _hear_of_failure(reducer)
        if lanes.state is not LaneState.OPEN:
            return
        if not lanes.backwards:
            raise UsageError(
                f"sync_gradients() closes lane {lanes.current} of step {lanes.step}, which has had no backward; call "
                f"loss.backward() inside no_sync() before, or model.skip_batch() if the lane is to count for nothing"
            )
        reducer.prepare()
        _close_without_backward(reducer)


def check_ended(reducer: "Reducer") -> None:
    """The user's loop asks for the next lane: the one before it must be closed."""
    lanes = _lanes_of(reducer)
    with reducer.lock, torch.no_grad():
        _hear_of_failure(reducer)
        if lanes.state is LaneState.OPEN:
            lane = f"lane {lanes.current} of step {lanes.step}"
            if lanes.backwards:
                ran = "its only backward" if lanes.backwards == 1 else f"all its {lanes.backwards} backwards"
                raise UsageError(
                    f"{lane} ended without a backward that closes it: {ran} ran inside no_sync(). Run the last "
                    f"backward of a lane outside of no_sync(), or call model.sync_gradients() there"
                )
            raise UsageError(
                f"{lane} ended without a backward; call loss.backward() once in the loop over lanes (earlier ones "
                f"inside no_sync()), or model.skip_batch()"
            )


def abandon(reducer: "Reducer", backward: Backward) -> None:
    """A backward ended with an exception. What it has left of its lane is not known, so no rank has gradients of this
    step: its reduction is completed without any, and the others are told."""
    lanes = _lanes_of(reducer)
    if not (backward.delivered or backward.reduces):
        return
    if lanes.state is not LaneState.OPEN:  # it was refused: see check_open
        reducer.set.drop_gradients()
        reducer.set.begin_lane()
        return
    reducer.on_failed()
    lane = lanes.current
    try:
        if reducer.turn.broken:  # no collective of ours would fit what the others do; the watch names us to them
            reducer.reset()
        else:
            _give_up(reducer, begun=lanes.last and backward.syncs and backward.delivered)
    finally:
        lanes.failed = lane


def laid_anew(reducer: "Reducer") -> None:
    """The buckets have other memory now, perhaps of another size or type, and so must the sums of lanes."""
    if (lanes := reducer.lanes) is not None:
        lost = lanes.holds
        lanes.forget_memory()
        if lost:
            raise UsageError(
                f"the module was given another type while lanes ran (before lane {lanes.current} of step {lanes.step}"
                f"), so the gradients of earlier lanes cannot be added to; convert it between steps"
            )


def _hear_of_failure(reducer: "Reducer") -> None:
    """A backward that ended with an exception ends its step, also if the loop has caught that and goes on."""
    if reducer.backwards.failed():
        reducer.abandon()
    _check_not_failed(reducer)


def _check_not_failed(reducer: "Reducer") -> None:
    lanes = _lanes_of(reducer)
    if lanes.failed is not None:
        raise BackwardAborted(
            f"the backward of lane {lanes.failed} in step {lanes.step} ended with an exception, so this step has no "
            f"gradients on any rank; catch it outside the loop over lanes, and go on with the next step",
            ranks=[reducer.transport.rank],
        )


def _close_without_backward(reducer: "Reducer") -> None:
    if _lanes_of(reducer).last:
        reducer.begin_reduction()
    if close(reducer):
        reducer.finish()


def _give_up(reducer: "Reducer", *, begun: bool = False) -> None:
    """Complete the reduction of a step that was left half-way, and tell the other ranks. `begun`: it flies already."""
    _lanes_of(reducer).give_up()
    reducer.prepare()
    if not begun:
        reducer.begin_reduction()
    abort(reducer)


def _lanes_of(reducer: "Reducer") -> Lanes:
    assert reducer.lanes is not None
    return reducer.lanes
