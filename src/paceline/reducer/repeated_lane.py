"""A lane that two ranks compute, for an audit: the gradients that its owner keeps, and the second run elsewhere.

The owner runs its lane as in any step; the result is copied before it is folded into the sums. The other rank runs the
lane after its own ones, when the step is reduced: the gradients of the step are set aside, the lane's go through the
same buckets by the same code, and then everything is restored. So the compared gradients had the same roundings.
"""

from collections.abc import Callable, Mapping

import torch

from paceline.reducer.lane_batch import LaneBatch
from paceline.reducer.lanes import Lanes, LaneState
from paceline.reducer.reducer import Reducer

LaneGrads = Mapping[int, torch.Tensor]  # the gradients of one lane, by bucket


class AuditedLanes(Lanes):
    """Lanes that can keep the gradients of one lane after its backward."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        self._kept_lane = -1
        self.kept: dict[int, torch.Tensor] = {}
        super().__init__(count, rank, size)

    def keep(self, lane: int) -> None:
        """Keep the gradients of `lane`, in memory of their own; -1: of no lane."""
        self._kept_lane = lane
        self.kept = {}

    def _add_left(self, bucket: int, flat: torch.Tensor) -> tuple[int, int]:
        if self.current == self._kept_lane:
            self.kept[bucket] = flat.clone()
        return super()._add_left(bucket, flat)


class _OneLane(Lanes):
    """A lane of another rank, which is not added to any sum."""

    reduces = False

    def __init__(self, count: int, lane: int, step: int) -> None:
        super().__init__(count, 0, 1)
        self.mine, self.step = range(lane, lane + 1), step

    @property
    def last(self) -> bool:
        return False  # this is what the reduction sums

    @property
    def holds(self) -> bool:
        return True  # the gradients of the step, which are set aside in the current layout

    def taken(self) -> LaneGrads:
        return {bucket: memory for bucket, ((_, memory),) in self._sums.items()}


class RepeatedLane:
    """Runs a lane once more in a replica whose step is reduced but not used yet."""

    def __init__(self, reducer: Reducer, lane: int) -> None:
        """From now on until `end()`, a backward is one of `lane`."""
        assert isinstance(reducer.batch, LaneBatch)
        self._reducer, self._batch, self._own = reducer, reducer.batch, reducer.batch.lanes
        self._one = _OneLane(self._own.count, lane, self._own.step)
        with reducer.lock, torch.no_grad():
            self._flats = [bucket.flat.clone() for bucket in reducer.bucket_set.buckets]
            self._put_back = [_set_aside(slot.param) for slot in reducer.bucket_set.slots if not slot.owned_elsewhere]
            self._put_back += [shard.set_aside() for shard in reducer.bucket_set.sharding.shards]
        self._batch.lanes = self._one
        self._one.open(lane)

    def end(self) -> LaneGrads | None:
        """Restore the replica. Returns the lane's gradients; None if its backward failed."""
        reducer = self._reducer
        with reducer.lock, torch.no_grad():
            reducer.backwards.close()  # one that has failed
            self._batch.lanes = self._own
            for slot in reducer.bucket_set.slots:
                slot.clear()
            for bucket, flat in zip(reducer.bucket_set.buckets, self._flats, strict=True):
                bucket.rearm()
                bucket.flat.copy_(flat)
            for put_back in reversed(self._put_back):
                put_back()
            reducer.schedule.rearm()
            reducer.weighting.reset()
            reducer.step_state.closed()
        return self._one.taken() if self._one.state is LaneState.CLOSED else None


def _set_aside(param: torch.Tensor) -> Callable[[], None]:
    grad, param.grad = param.grad, None

    def put_back() -> None:
        param.grad = grad

    return put_back
