"""A step whose global batch is cut into lanes: its start, and lanes that are full, empty or failed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.collectives.reduction import LaneBlock
from paceline.errors import BackwardAborted, UnreducedGradients, UsageError
from paceline.reducer import lane_shapes, report_errors
from paceline.reducer.autograd import Backward
from paceline.reducer.damaged_messages import check_damage
from paceline.reducer.lanes import Lanes, LaneState
from paceline.reducer.participation import abandon, abort
from paceline.reducer.report import Abort, Mode, StepReport, StepRole
from paceline.reducer.unreduced import drop_all, first_with_gradient

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


class LaneBatch:
    """This rank's part of the global batch: some of its lanes, one after another. The reducer calls the same methods
    as of `RankBatch`; the loop over lanes calls the rest."""

    has_lanes = True
    microbatches = 0  # ranks may run different numbers of lanes

    def __init__(self, reducer: "Reducer", lanes: Lanes) -> None:
        self._reducer = reducer
        self.lanes = lanes
        self._damaged: list[tuple[int, int]] = []  # damaged messages: bucket and sender

    # ---- what the reducer asks

    @property
    def count(self) -> int:
        return self.lanes.count

    @property
    def weight_columns(self) -> int:
        return self.lanes.count

    @property
    def step(self) -> int:
        return self.lanes.step

    @property
    def last(self) -> bool:
        return self.lanes.last

    @property
    def holds(self) -> bool:
        return self.lanes.holds

    @property
    def resumes(self) -> bool:
        """Whether the current lane has had a backward."""
        return self.lanes.backwards > 0

    def counts(self, role: StepRole) -> bool:
        return role in (StepRole.FULL, StepRole.SKIPPED)  # before a skipped lane, others did use parameters

    def shape_digest(self) -> int:
        return lane_shapes.shape_digest(self.lanes)

    def lane_weights(self) -> tuple[float, ...]:
        return tuple(self.lanes.weights)

    def blocks(self, bucket: int, flat: torch.Tensor) -> Sequence[LaneBlock]:
        return self.lanes.blocks(bucket, flat)

    def check(self, rows: Sequence[StepReport]) -> None:
        if any(row.abort is not Abort.NO for row in rows):
            check_damage(rows, self._damaged, self._reducer.group)
        else:
            lane_shapes.check(rows, self.lanes, self._reducer.group)

    def begin_backward(self) -> None:
        """A backward begins: it must belong to the current lane."""
        lanes = self.lanes
        self._check_not_failed()
        if lanes.state is LaneState.CLOSED:
            raise UsageError(
                f"lane {lanes.current} has already run its backward; run all but the last backward of a lane inside "
                f"model.no_sync()"
            )
        if lanes.state is LaneState.NONE:
            raise UsageError(
                f"this replica trains in {lanes.count} lanes, but no lane is running; call backward inside "
                f"`for batch in model.lanes(microbatches, step):`"
            )
        lanes.backwards += 1

    def begin_untouched(self, backward: Backward) -> None:
        self._reducer.begin(backward)

    def begin_reduction(self) -> None:
        """The step has begun long ago."""

    def end_backward(self, *, skipped: bool = False) -> bool:
        """A lane's gradients are complete: keep them for this rank's other lanes. Returns True after the last lane,
        when the step is to be reduced. `skipped`: the lane contributes nothing."""
        reducer, lanes = self._reducer, self.lanes
        weight = reducer.weighting.of_lane()
        lanes.close(0.0 if skipped else weight, plain=not skipped and reducer.weighting.last is not Mode.WEIGHTED)
        if lanes.last:
            return True
        reducer.backwards.close()
        reducer.pad_missing()
        if reducer.contribution.late:
            raise report_errors.late_gradient(reducer.bucket_set.slots)
        for bucket in reducer.bucket_set.buckets:
            bucket.complete(reducer.schedule.scale)
            lanes.fold(bucket.spec.index, bucket.flat)
        self._empty_buckets()
        for call in reducer.callbacks.finished:
            call()
        return False

    def abandon(self, backward: Backward, why: Abort) -> bool:
        """A backward ended with an exception. The state of its lane is unknown, so no rank has gradients of
        this step: its reduction is completed without any, and the report tells the others."""
        reducer, lanes = self._reducer, self.lanes
        if not (backward.delivered or backward.reduces):
            return True
        # It was refused (see begin_backward), or it belongs to a lane that no other rank waits for.
        if lanes.state is not LaneState.OPEN or not lanes.reduces:
            drop_all(reducer.bucket_set)
            self._empty_buckets()
            return True
        for call in reducer.callbacks.failed:
            call()
        lane = lanes.current
        try:
            if reducer.schedule.broken:  # collectives would not match those of other ranks; the watch reports it
                reducer.reset()
            else:
                self._abort_step(why, begun=lanes.last and backward.syncs and backward.delivered)
        finally:
            lanes.failed = lane
        return True

    def reset(self, *, memory_lost: bool) -> None:
        if memory_lost:
            self.lanes.forget_memory()
        self._damaged.clear()
        self.lanes.end()

    def memory_moved(self) -> None:
        """The buckets have other memory now, perhaps of another size or type, so the sums of lanes need new memory
        too."""
        lanes, lost = self.lanes, self.lanes.holds
        lanes.forget_memory()
        if lost:
            raise UsageError(
                f"the module was converted to another dtype during the loop over lanes (before lane {lanes.current} of "
                f"step {lanes.step}), so the gradients of earlier lanes cannot be added to; convert it between steps"
            )

    def follow_group(self) -> None:
        transport = self._reducer.transport
        self.lanes.deal(transport.rank, transport.size)

    def check_update(self) -> None:
        if self.lanes.under_way:
            raise UnreducedGradients(
                f"optimizer.step() was called although only {self.lanes.run} of the {len(self.lanes.mine)} lanes of "
                f"this rank have run, so there are no gradients of this step yet; step after the loop over "
                f"model.lanes()"
            )

    def note_damage(self, bucket: int, sender: int) -> None:
        """A message of rank `sender` about a bucket was damaged on its way here."""
        self._damaged.append((bucket, sender))
        self._reducer.contribution.abort = Abort.DAMAGED

    # ---- what the loop over lanes calls

    def begin_step(self) -> str | None:
        """A step of lanes begins. Returns the name of a parameter that has a gradient already, if there is one.

        If the previous step was abandoned half-way, the other ranks wait for its reduction: it is completed without
        gradients, and the report tells them.
        """
        reducer, lanes = self._reducer, self.lanes
        with reducer.lock, torch.no_grad():
            if reducer.backwards.failed():
                abandon(reducer)
            if lanes.under_way or lanes.owed:
                self._abort_step()
            lanes.failed = None
            reducer.step_state.discarded()
            reducer.apply_pending_layout()  # on all ranks in the same step, whatever happens in their first lanes
            stale = first_with_gradient(reducer.bucket_set)
            if stale is None:
                drop_all(reducer.bucket_set)
            return stale

    def owe(self, step: int) -> None:
        """Step `step` has begun, and none of its lanes will run here: the next `begin_step` tells the others."""
        self.lanes.step, self.lanes.owed = step, True

    def skip(self) -> None:
        """The current lane contributes nothing."""
        reducer, lanes = self._reducer, self.lanes
        with reducer.lock, torch.no_grad():
            self._raise_if_failed()
            if lanes.state is not LaneState.OPEN:
                ran = f"lane {lanes.current} of step {lanes.step} has already run its backward"
                raise UsageError(
                    f"skip_batch() applies to the running lane, but "
                    f"{ran if lanes.under_way else 'no lane is running'}; call it in the loop over model.lanes(), "
                    f"instead of the lane's last backward"
                )
            reducer.prepare()
            drop_all(reducer.bucket_set)
            self._empty_buckets()  # an earlier microbatch of this lane may have left gradients
            self._close_without_backward(skipped=True)

    def sync(self) -> None:
        """Close the current lane with what its microbatches have accumulated, without another backward."""
        reducer, lanes = self._reducer, self.lanes
        with reducer.lock, torch.no_grad():
            if not reducer.sync_on:
                return
            self._raise_if_failed()
            if lanes.state is not LaneState.OPEN:
                return
            if not lanes.backwards:
                raise UsageError(
                    f"sync_gradients() closes lane {lanes.current} of step {lanes.step}, which has had no backward; "
                    f"call loss.backward() inside no_sync() before, or model.skip_batch() if the lane should count for "
                    f"nothing"
                )
            reducer.prepare()
            self._close_without_backward()

    def check_ended(self) -> None:
        """The user's loop asks for the next lane: the previous one must be closed."""
        reducer, lanes = self._reducer, self.lanes
        with reducer.lock, torch.no_grad():
            self._raise_if_failed()
            if lanes.state is LaneState.OPEN:
                lane = f"lane {lanes.current} of step {lanes.step}"
                if lanes.backwards:
                    ran = "its only backward" if lanes.backwards == 1 else f"all its {lanes.backwards} backwards"
                    raise UsageError(
                        f"{lane} ended without a backward that closes it: {ran} ran inside no_sync(). Run the last "
                        f"backward of a lane outside no_sync(), or call model.sync_gradients() there"
                    )
                raise UsageError(
                    f"{lane} ended without a backward; call loss.backward() once in the loop over lanes (earlier ones "
                    f"inside no_sync()), or model.skip_batch()"
                )

    def _raise_if_failed(self) -> None:
        """A backward that ended with an exception ends its step, even if the loop has caught that and continues."""
        if self._reducer.backwards.failed():
            abandon(self._reducer)
        self._check_not_failed()

    def _check_not_failed(self) -> None:
        reducer, lanes = self._reducer, self.lanes
        if lanes.failed is not None:
            raise BackwardAborted(
                f"the backward of lane {lanes.failed} in step {lanes.step} ended with an exception, so this step has "
                f"no gradients on any rank; catch it outside the loop over lanes, and continue with the next step",
                ranks=[reducer.transport.rank],
            )

    def _close_without_backward(self, *, skipped: bool = False) -> None:
        if self.lanes.last:
            self._reducer.begin_reduction(StepRole.SKIPPED if skipped else StepRole.FULL)
        if self.end_backward(skipped=skipped):
            self._reducer.finish()

    def _abort_step(self, why: Abort = Abort.EXCEPTION, *, begun: bool = False) -> None:
        """Complete the reduction of a step that was abandoned half-way, and tell the others. `begun`: it is already in
        flight."""
        reducer = self._reducer
        self.lanes.cancel_remaining()
        reducer.prepare()
        if not begun:
            reducer.begin_reduction()
        abort(reducer, why)

    def _empty_buckets(self) -> None:
        """Empty the buckets for the next lane, but keep which parameters earlier lanes used."""
        for bucket in self._reducer.bucket_set.buckets:
            bucket.rearm()
        for slot in self._reducer.bucket_set.slots:
            slot.clear_backward()
        self._reducer.schedule.rearm()
