"""When buckets fly: from "autograd has a gradient" to "every rank has the mean".

    on_grad_ready ─ counts a bucket down ─→ _launch ─→ reduction(bucket) ─→ transport.all_reduce
    end of backward ─→ _finish ─ completes, waits in order, hands the gradients back

Buckets are launched strictly in index order whatever order they fill in, so ranks cannot disagree about the order of
collectives. Nothing here looks at the graph: a parameter that took no part is one whose hook did not run by the end.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.collectives.api import Transport, Work
from paceline.collectives.reduction import Reduction
from paceline.collectives.wait import FutureWork, finish
from paceline.errors import IllegalMove
from paceline.layout import BucketCaps, Layout
from paceline.reducer import agreement, autograd
from paceline.reducer.agreement import WORD_COUNT, Mode, Words
from paceline.reducer.bucket import Bucket, BucketState, GradSlot
from paceline.reducer.buckets import BucketSet
from paceline.reducer.graph import GraphMemory
from paceline.trace import Moment, Trace


@dataclass(frozen=True, slots=True)
class ReducerSettings:
    """What the user chose, equal on every rank."""

    caps: BucketCaps
    overlap: bool = True
    unused: str = "zero"  # or "error"
    static_graph: bool = False
    timeout_s: float | None = None
    skip_unused: bool = False  # the user vouches that ranks agree on unused parameters: leave out unused buckets
    hold: bool = False  # never show unreduced gradients: their dtype is not the parameter's (mixed precision)


@dataclass(slots=True)
class Backward:
    """One backward under way."""

    task: int
    syncs: bool
    running: "weakref.ref[Callable[[], None]]"  # dead when the backward ended without its callback
    nested: bool = False  # a backward ran inside this one
    delivered: bool = False  # some parameter got a gradient


class Reducer:
    """Keeps the gradients of one replica equal to the mean over all ranks."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: Layout,
        transport: Transport,
        reduction: Reduction,
        settings: ReducerSettings,
    ) -> None:
        self.transport = transport
        self.reduction = reduction
        self.settings = settings
        self.trace = Trace()
        # What the replica switches.
        self.sync_on = True  # no_sync() and disable_grad_sync()
        self.divisor: float = transport.size  # join() may lower it to the ranks that still have data
        self.weight: float | None = None  # inside weight(n): n
        self.optimizes_in_backward = False
        self.after_backward: list[torch.futures.Future[object]] = []  # buffer hooks to wait for
        self.on_finished: Callable[[], None] | None = None  # restores parameters under mixed precision
        # What it may read.
        self.reductions = 0  # begun so far; equal on all ranks
        self.reductions_since_step = 0
        self.forwards_since_step = 0  # forwards whose backward is to be reduced
        self.window_open = False  # something ran that was not reduced yet
        self.uses: list[int] | None = None  # of the last reduction; None: every parameter on every rank
        self.ready_order: list[int] = []  # of the last reduction
        self.order_learned = False
        self.buckets_reduced = 0  # in the last reduction
        self.graph = GraphMemory()
        self.last_error: str | None = None

        self._lock = threading.RLock()  # a module on several devices has a backward thread for each
        self._asleep = False
        self._backward: Backward | None = None
        self._mode = Mode.NOTHING
        self._weight_sum = 0.0
        self._shadowing = False
        self._aborting = False
        self._words: tuple[Work, torch.Tensor] | None = None
        self._set = BucketSet(params, layout, transport)
        self._wake()
        self._handles = [p.register_post_accumulate_grad_hook(self.on_grad_ready) for p in params]

    # ---- the way of a gradient

    def on_grad_ready(self, param: torch.Tensor) -> None:
        """Autograd has added to `param.grad`. Runs once per parameter and backward, on the thread of the backward."""
        if torch.is_grad_enabled():  # with create_graph=True; the usual backward does not pay for the switch
            with torch.no_grad():
                return self.on_grad_ready(param)
        with self._lock:
            if self._asleep or param.grad is None:  # None: autograd delivered an undefined gradient
                return None
            backward = self._enter(autograd.task_id())
            if not backward.delivered:
                self._begin(backward)
            slot = self._set.slot_of[id(param)]
            bucket = slot.bucket
            slot.used = slot.dirty = True
            if not backward.syncs:
                self._keep_for_later(slot)
            elif bucket.state is BucketState.FLYING:
                slot.late = True  # stays in param.grad until the end; see the note in Bucket.collect
            else:
                bucket.collect(slot, self._scale_in())
                if not slot.fired:
                    slot.fired = True
                    self.ready_order.append(slot.index)
                    bucket.missing -= 1
                    if bucket.missing == 0:
                        bucket.move(BucketState.FULL)
                        self.trace.stamp(Moment.READY, self.reductions, bucket.spec.index)
                        self._launch()
                self._stamp_completed()
            return None

    def _launch(self) -> None:
        """Start every full bucket whose turn it is; after the last one, the words."""
        last = self._set.last
        while self._set.next <= last and self._set.buckets[self._set.next].state is BucketState.FULL:
            if self._set.next == last and self._backward is not None and self._backward.nested:
                return  # the words go with the last bucket, and late gradients may still come
            bucket = self._set.buckets[self._set.next]
            bucket.move(BucketState.FLYING)
            self.trace.stamp(Moment.LAUNCHED, self.reductions, bucket.spec.index)
            if not bucket.skipped:
                bucket.flight = self.reduction(bucket.grad_bucket(last=self._set.next == last), self.transport)
            self._set.next += 1
        if self._set.next > last and self._words is None and not self.reduction.chains:
            self._send_words()

    def _finish(self) -> None:
        """The backward is over: complete what is missing, wait for everything in order, hand the gradients back.

        Whatever is raised here, the reducer is ready for the next backward afterwards; the gradients of this one are
        gone unless the error says otherwise.
        """
        self.trace.stamp(Moment.BACKWARD_END, self.reductions)
        self._backward = None
        try:
            for bucket in self._set.buckets:
                if bucket.state is BucketState.FILLING:
                    bucket.skipped = self.settings.skip_unused and not any(slot.used for slot in bucket.slots)
                    for slot in bucket.slots:
                        if not slot.fired:
                            bucket.contribute_nothing_new(slot, self._scale_in())
                    bucket.move(BucketState.FULL)
            self._launch()
            for bucket in self._set.buckets:
                self._land(bucket)
            self.buckets_reduced = sum(not bucket.skipped for bucket in self._set.buckets)
            error = self._settle(self._receive_words())
        finally:
            self._reset()
        if error is not None:
            self.last_error = str(error)
            raise error

    def _land(self, bucket: Bucket) -> None:
        index = bucket.spec.index
        self.trace.stamp(Moment.WAIT_ENTERED, self.reductions, index)
        if bucket.flight is not None:
            self._wait(bucket.flight.work, f"bucket {index} of backward {self.reductions}")
            bucket.put_result(bucket.flight.land())
        bucket.move(BucketState.LANDED)
        self.trace.stamp(Moment.WAIT_LEFT, self.reductions, index)

    def _settle(self, words: list[Words]) -> Exception | None:
        """All buckets are reduced: apply what the ranks told each other and give the gradients back.

        Returns the error to raise, the same on every rank, once everything is in its place again.
        """
        slots, timeout_s = self._set.slots, self.settings.timeout_s
        if self.on_finished is not None:
            self.on_finished()
        if any(row.aborted for row in words):
            return None if self._aborting else agreement.aborted_error(words)
        if any(row.late for row in words):
            late_scale = 1.0 / self.divisor if self.weight is None else self.weight
            agreement.reduce_late(slots, self.transport, late_scale, timeout_s)
        if any(row.mode is Mode.WEIGHTED for row in words):
            total = sum(row.weight for row in words)
            self._rescale((self.divisor if self.reduction.divides else 1.0) / total if total else 0.0)
        self.uses = None
        error: Exception | None = None
        if any(row.unused for row in words):
            self.uses = agreement.count_uses(slots, self.transport, timeout_s)
            if self.settings.unused == "error":
                error = agreement.unused_error(slots, self.transport, timeout_s)
        if not self.optimizes_in_backward:
            for slot in slots:
                used_somewhere = self.uses is None or self.uses[slot.index] > 0
                slot.bucket.hand_back(slot, touched=used_somewhere and not self._shadowing)
        if not self.order_learned:
            self._learn_order()
        self.reductions_since_step += 1
        for future in self.after_backward:
            self._wait(FutureWork(future), f"a buffer hook of backward {self.reductions}")
        self.after_backward.clear()
        if self._shadowing:
            return None
        return error or self.graph.compare(slots, static=self.settings.static_graph)

    # ---- one backward

    def _enter(self, task: int) -> Backward:
        """The backward that is under way, begun if need be. A backward inside it counts as part of it."""
        current = self._backward
        if current is not None:
            if current.task == task:
                return current
            if current.running() is not None:
                current.nested = True
                return current
            self.abandon()
        self._set.move_to_plan(self.transport)
        syncs = self.sync_on and self.settings.overlap
        self._backward = Backward(task, syncs, autograd.at_end_of_backward(self._at_end))
        return self._backward

    def _begin(self, backward: Backward) -> None:
        """The first gradient of a backward has come, so it is one that reduces (and not `autograd.grad`)."""
        backward.delivered = True
        self._mode = self._mode.and_then(Mode.PLAIN if self.weight is None else Mode.WEIGHTED)
        self._weight_sum += self.weight or 0.0
        if backward.syncs:
            self._begin_reduction()
        else:
            self.window_open = True

    def _at_end(self) -> None:
        with self._lock, torch.no_grad():
            backward = self._backward
            if backward is None:
                return
            if backward.delivered and backward.syncs:
                self._finish()
            self._backward = None

    def _begin_reduction(self) -> None:
        self.reductions += 1
        self.ready_order = []
        self.trace.stamp(Moment.BACKWARD_BEGIN, self.reductions)

    def _reset(self) -> None:
        self._set.leave_flying_memory(self.transport)
        self._set.rearm()
        self._words = None
        self._mode = Mode.NOTHING
        self._weight_sum = 0.0
        self._shadowing = self._aborting = self.window_open = False

    def _keep_for_later(self, slot: GradSlot) -> None:
        if self.weight is None and not self.settings.hold:
            slot.bucket.stash(slot)
        else:  # autograd must not add an unweighted gradient to a weighted one, so the bucket does the adding
            slot.bucket.collect(slot, self._scale_in())

    def _scale_in(self) -> float:
        if self.weight is not None:
            return self.weight
        return 1.0 if self.reduction.divides else 1.0 / self.divisor

    def _rescale(self, factor: float) -> None:
        for bucket in self._set.buckets:
            bucket.flat.mul_(factor)

    def _wait(self, work: Work, what: str) -> None:
        finish(work, what=what, watch=self.transport.watch, timeout_s=self.settings.timeout_s)

    def _stamp_completed(self) -> None:
        """Note what has completed meanwhile: the proof of overlap, and where a transport may make progress."""
        for index in self._set.newly_completed():
            self.trace.stamp(Moment.COMPLETED, self.reductions, index)

    def _send_words(self) -> None:
        quiet = self._shadowing or self._aborting
        words = Words(
            reduction=self.reductions,
            unused=0 if quiet else sum(not slot.used for slot in self._set.slots),
            late=sum(slot.late for slot in self._set.slots),
            mode=self._mode,
            weight=self._weight_sum,
            aborted=self._aborting,
        )
        gathered = torch.empty(self.transport.size * WORD_COUNT, dtype=torch.int64)
        self._words = self.transport.all_gather(gathered, words.encode()), gathered

    def _receive_words(self) -> list[Words]:
        if self._words is None:
            self._send_words()
        assert self._words is not None
        work, gathered = self._words
        self._wait(work, f"the words of backward {self.reductions}")
        return agreement.decode_all(gathered)

    def _learn_order(self) -> None:
        """Plan buckets in the order in which rank 0 saw gradients become ready, for the next step."""
        seen = set(self.ready_order)
        rest = [index for index in self._set.layout.order if index not in seen]
        order = torch.tensor([*self.ready_order, *rest], dtype=torch.int64)
        self._wait(self.transport.broadcast(order, 0), "the order of gradients")
        self._set.plan(order.tolist(), self.settings.caps)
        self.order_learned = True

    # ---- what the replica calls

    def before_forward(self, *, training: bool) -> None:
        """Forget a backward that failed, take up a new layout, and note that a step has begun."""
        with self._lock, torch.no_grad():
            if self._asleep:
                self._wake()
            if autograd.task_id() == -1 and self._backward is not None:
                self.abandon()
            if self._backward is None:
                self._set.move_to_plan(self.transport)
            if training and self.sync_on and self.settings.overlap:
                self.forwards_since_step += 1
            elif training:
                self.window_open = True

    def watch_backward(self, output: torch.Tensor) -> None:
        """Have the backward that goes through `output` end with a reduction, also when its gradients all come from
        nested backwards. Does nothing for `autograd.grad`, which delivers no gradients to parameters."""

        def on_backward(_: torch.Tensor) -> None:
            with self._lock:
                if not self._asleep:
                    self._enter(autograd.task_id())

        output.register_hook(on_backward)

    def reduce_now(self) -> None:
        """Reduce what has been accumulated so far, without another backward."""
        with self._lock, torch.no_grad():
            if self._backward is not None and self._backward.running() is not None:
                raise IllegalMove("sync_gradients() was called while a backward runs; call it after loss.backward()")
            self._set.move_to_plan(self.transport)
            self._begin_reduction()
            self._finish()

    def shadow(self) -> None:
        """Take part in a reduction with zeros, and keep the own gradients: a rank without data inside join()."""
        with self._lock, torch.no_grad():
            self._set.move_to_plan(self.transport)
            self._begin_reduction()
            self._shadowing = True
            for slot in self._set.slots:
                slot.bucket.lend(slot)
                slot.fired = True
            for bucket in self._set.buckets:
                bucket.move(BucketState.FULL)
            self._finish()

    def abandon(self) -> None:
        """Forget a backward that ended with an exception: drop its gradients and be ready for the next one.

        If its reduction had begun, the other ranks wait for the rest of it. It is completed, and they are told.
        """
        with self._lock, torch.no_grad():
            backward, self._backward = self._backward, None
            if backward is None or not (backward.delivered and backward.syncs):
                self._reset()
                return
            self._aborting = True
            self._finish()

    def take_gradients(self) -> None:
        """Take what is in `param.grad` into the buckets, so that the dtype of the parameters may change."""
        with self._lock, torch.no_grad():
            for slot in self._set.slots:
                if slot.param.grad is not None:
                    slot.bucket.contribute_nothing_new(slot, self._scale_in())

    def unreduced(self) -> list[str]:
        """Names of parameters whose gradients were not reduced since they were last added to."""
        return [slot.meta.name for slot in self._set.slots if slot.dirty]

    def join_with_zeros_if_others_wait(self) -> None:
        """At an optimizer step: if the loss of this rank touched no parameter, the others wait for it. Join them."""
        if self.sync_on and self.forwards_since_step and not self.reductions_since_step and not self.window_open:
            self.reduce_now()

    def move_to(self, transport: Transport) -> None:
        """Go on over another transport; the order of gradients is learned anew by the new set of ranks."""
        self.transport = transport
        self.divisor = transport.size
        self.reductions = 0
        self.order_learned = False

    def relay_now(self) -> bool:
        """Take up the planned layout, if there is one and nothing is under way."""
        with self._lock, torch.no_grad():
            return self._backward is None and self._set.move_to_plan(self.transport)

    def set_static_graph(self) -> None:
        """Refuse graphs that differ from the first one seen."""
        self.settings = replace(self.settings, static_graph=True)

    @property
    def layout(self) -> Layout:
        return self._set.layout

    def close(self) -> None:
        """Remove every hook. The gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        sleeping = [other for other in self._others() if other._asleep]
        if sleeping and not self._asleep:
            sleeping[-1]._asleep = False

    def _wake(self) -> None:
        """Of several replicas of one module only one reduces: the one that was made, or called, last."""
        for other in self._others():
            other._asleep = True
        self._asleep = False

    def _others(self) -> "list[Reducer]":
        owners = autograd.hook_owners(self._set.slots[0].param)
        return [owner for owner in owners if isinstance(owner, Reducer) and owner is not self]
