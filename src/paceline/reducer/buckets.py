"""All buckets of one replica: their memory under the current layout, and when they are launched.

They are launched strictly in index order, whatever order they fill in, so ranks cannot disagree about the order of
collectives. Launched buckets are waited for in the same order.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.collectives.group import Group
from paceline.collectives.protocols import Transport, Work
from paceline.collectives.reduction_protocol import Reduction
from paceline.device_clock import stamp_end
from paceline.layout import BucketCaps, Layout, plan_layout
from paceline.reducer.allocate import WHOLE, Sharding, make_buckets
from paceline.reducer.bucket import Bucket, BucketState, GradSlot
from paceline.reducer.conversion import follow_conversion
from paceline.reducer.relayout import move_gradients
from paceline.reducer.single_gradient import contribute_nothing_new
from paceline.reducer.step_observer import StepObserver
from paceline.trace import Moment, Trace

if TYPE_CHECKING:
    from paceline.reducer.lane_batch import LaneBatch
    from paceline.reducer.step import RankBatch


PATIENCE_S = 0.2  # for memory that another bucket uses: gradients that wait for it have memory of their own


class BucketSet:
    """The gradients of one replica: a slot per parameter, in buckets that are launched in index order.

    The memory is allocated when it is first needed. A world of one never needs it: see `Reducer.is_alone`.
    """

    def __init__(self, params: Sequence[torch.Tensor], layout: Layout, sharding: Sharding = WHOLE) -> None:
        pairs = zip(layout.params, params, strict=True)
        self.slots = [GradSlot(index, meta, param) for index, (meta, param) in enumerate(pairs)]
        self.slot_of = {id(slot.param): slot for slot in self.slots}
        self.sharding = sharding
        for slot, shard in zip(self.slots, sharding.shards, strict=False):
            slot.shard = shard
        self.layout = layout
        self.first = layout  # with which all ranks begin, before anything was learned
        self.buckets: list[Bucket] = []
        self.planned: Layout | None = None

    def allocate(self, transport: Transport) -> None:
        """Allocate the buckets of the layout and point every slot into them."""
        self.buckets = make_buckets(self.layout, self.slots, transport, self.sharding)

    @property
    def allocated(self) -> bool:
        return bool(self.buckets)

    def rearm(self) -> None:
        """Prepare for the next reduction, after a complete or an interrupted one."""
        for slot in self.slots:
            slot.clear()
        for bucket in self.buckets:
            bucket.rearm()

    def results(self) -> list[torch.Tensor]:
        """The reduced gradients that this rank keeps: all of them, or its shards."""
        return [part for bucket in self.buckets if not bucket.skipped for part in bucket.result]

    def begin_backward(self) -> None:
        """Autograd is about to add to gradients."""
        for shard in self.sharding.shards:
            shard.begin_backward()

    def forget_arrived(self) -> None:
        """A backward has failed: its gradients stay where autograd put them."""
        for bucket in self.buckets:
            bucket.arrived.clear()

    def pad_missing(self, scale: float, *, skips_unused: bool) -> list[Bucket]:
        """Complete the buckets that lack gradients, now that backward is over. Returns these."""
        lacking = [bucket for bucket in self.buckets if bucket.state is BucketState.FILLING]
        for bucket in lacking:
            bucket.skipped = skips_unused and not any(slot.used for slot in bucket.slots)
            for slot in bucket.slots:
                if slot.owned_elsewhere:
                    bucket.zero(slot)
                elif not slot.fired:
                    contribute_nothing_new(slot, scale)
            bucket.move(BucketState.FULL)
        return lacking

    def replace_launched_memory(self, transport: Transport) -> bool:
        """Replace memory that a transport may still write to: the wait for it was interrupted. Returns True if
        there was any.

        Its work is not queried: a work of several collectives would start the next one.
        """
        if any(bucket.state is BucketState.LAUNCHED and bucket.flight is not None for bucket in self.buckets):
            self.allocate(transport)
            return True
        return False

    def follow_parameters(self, caps: BucketCaps, transport: Transport) -> bool:
        """Lay out again if the module was converted after wrapping, as by `module.double()`. Returns True if it was."""
        if not [slot for slot in self.slots if slot.param.dtype is not slot.meta.dtype]:
            return False
        metas = follow_conversion(self.slots, sharded=self.sharding.ownership is not None)
        self.planned = None
        self.layout = plan_layout(metas, self.layout.order, caps)
        self.first = plan_layout(metas, self.first.order, caps)
        if self.allocated:
            self.allocate(transport)
        return True

    def plan(self, layout: Layout) -> None:
        """Store a layout for the next `relayout`."""
        self.planned = layout if layout != self.layout else None

    def relayout(self, transport: Transport) -> bool:
        """Switch to the planned layout. Gradients that are views move along; held ones delay it."""
        if self.planned is None or any(slot.held for slot in self.slots):
            return False
        self.layout, self.planned = self.planned, None
        if self.allocated:
            move_gradients(self, transport)
        return True


class Schedule:
    """Launches the buckets of one replica, and waits for their results."""

    def __init__(
        self,
        buckets: BucketSet,
        group: Group,
        reduction: Reduction,
        trace: Trace,
        wait: Callable[[Work, str], None],
    ) -> None:
        self.reduction = reduction
        self._wait = wait
        self.batch: RankBatch | LaneBatch  # this rank's part of the global batch
        self.scale = 1.0  # the factor for gradients that enter a bucket
        self.observer: StepObserver | None = None
        self.reductions_begun = 0  # also the number of the one that runs, or ran last; equal on all ranks
        self.launch_digest = 0  # of the buckets launched so far; equal on all ranks
        self.polls = False  # whether work progresses only when it is queried
        self.broken = False  # a reduction itself raised, so it is unknown what the other ranks have received
        self._bucket_set = buckets
        devices = {meta.device for meta in buckets.layout.params}
        self._device = buckets.layout.params[0].device
        self._on_one_device = len(devices) == 1 and self._device.type == "cuda"
        self._group = group
        self._trace = trace
        self._next = 0  # the bucket whose turn it is
        self._completed = 0  # the number known to have completed
        self._patient = True  # no wait of this reduction has exceeded PATIENCE_S

    def begin(self) -> None:
        """A backward begins."""
        traits = self._group.transport.traits(self._device)
        self.polls = traits.progress_on_caller or self.reduction.multi_step

    def rearm(self) -> None:
        """The reduction is over, or was interrupted: start with the first bucket again."""
        self._next = self._completed = 0
        self.broken, self._patient = False, True

    @property
    def stream_ordered(self) -> bool:
        """Whether the host need not wait for reductions, because waiting for a collective orders a stream."""
        return self._on_one_device and self._group.transport.traits(self._device).stream_ordered

    @property
    def one_after_another(self) -> bool:
        """Whether a full bucket may have to wait for others, and so be launched at another time than on other
        ranks: nothing else may be sent before all of them."""
        return self.reduction.multi_step or self._bucket_set.sharding.turns is not None

    @property
    def looks_at_sums(self) -> bool:
        """Whether the report of a reduction has to wait for its sums."""
        return self.observer is not None and self.observer.looks_at_sums

    @property
    def launched_all(self) -> bool:
        return self._next == len(self._bucket_set.buckets)

    @property
    def outstanding(self) -> bool:
        """Whether something was launched that is not known to have completed."""
        return self._next > self._completed

    def launch(self) -> None:
        """Start every full bucket whose turn it is."""
        if not self.batch.last:
            return  # gradients of further lanes will follow
        buckets = self._bucket_set.buckets
        while self._next < len(buckets) and buckets[self._next].state is BucketState.FULL:
            if self.reduction.multi_step and self.busy_after_advancing():
                return  # the collectives of its callbacks would be unordered with those of the next bucket
            bucket = buckets[self._next]
            if not self._has_memory(self._next):
                return
            bucket.complete(self.scale)
            bucket.move(BucketState.LAUNCHED)
            self._trace.stamp(Moment.LAUNCHED, self.reductions_begun, bucket.spec.index, bucket.collective)
            if not bucket.skipped:
                blocks = self.batch.blocks(bucket.spec.index, bucket.flat)
                self.launch_digest = hash((self.launch_digest, bucket.key))
                if self.observer is not None and self.observer.looks_at_sums:
                    self.observer.look_at_own([part for _, part in blocks] or [bucket.flat])
                last = self._next == len(buckets) - 1
                self.broken = True  # until the reduction has returned
                bucket.flight = self.reduction(bucket.grad_bucket(blocks, last=last), self._group.transport)
                self.broken = False
                if self._trace.device_times and self.stream_ordered:
                    stamp_end(self._trace, bucket.flight.work, bucket.spec.index, bucket.collective)
            self._next += 1
            if bucket.on_host and not self.polls:
                self._note_completed()

    def advance(self) -> None:
        """Let the transport make progress on outstanding work, and note what has completed, which shows the overlap."""
        self._group.transport.progress()
        self._note_completed()
        if self.one_after_another:
            self.launch()

    def _has_memory(self, index: int) -> bool:
        """Whether a bucket that takes turns may be filled: the one before it in the same memory is reduced. A host
        waits only briefly for a late rank, which may reduce it only at the end of its backward, and need this rank."""
        turns = self._bucket_set.sharding.turns
        if turns is None or index < turns:
            return True
        before = self._bucket_set.buckets[index - turns]
        if before.flight is not None and not self.stream_ordered and not before.flight.work.done():
            what = f"bucket {index - turns} of backward {self.reductions_begun}"
            self._patient = self._patient and self._group.wait_a_moment(before.flight.work, what, PATIENCE_S)
            if not self._patient:
                return False
        self._wait_result(before)
        before.flight = None  # it holds what was sent and received, as large as the bucket
        return True

    def wait_results(self) -> None:
        """Wait for the buckets in order and store their results."""
        for bucket in self._bucket_set.buckets:
            self.launch()
            self._wait_result(bucket)

    def _wait_result(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.REDUCED:
            return
        self._trace.stamp(Moment.WAIT_ENTERED, self.reductions_begun, bucket.spec.index, bucket.collective)
        if bucket.flight is not None:
            if not (self.stream_ordered and bucket.flight.work.wait(0.0)):
                self._wait(bucket.flight.work, f"bucket {bucket.spec.index} of backward {self.reductions_begun}")
                self._note_completed()
            bucket.store_result(bucket.flight.result())
        bucket.move(BucketState.REDUCED)
        self._trace.stamp(Moment.WAIT_LEFT, self.reductions_begun, bucket.spec.index, bucket.collective)

    def busy_after_advancing(self) -> bool:
        """Let works of several collectives start their next one. Returns whether a collective is then under way."""
        launched = (b for b in self._bucket_set.buckets if b.state is BucketState.LAUNCHED)
        return any(b.flight is not None and not b.flight.work.done() for b in launched)

    def _note_completed(self) -> None:
        while self._completed < self._next:
            bucket = self._bucket_set.buckets[self._completed]
            if bucket.flight is not None and not bucket.flight.work.done():
                return
            self._trace.stamp(Moment.COMPLETED, self.reductions_begun, self._completed, bucket.collective)
            self._completed += 1
