"""When buckets fly: from "autograd has a gradient" to "every rank has the mean".

    on_grad_ready ─ counts a bucket down ─→ _launch ─→ reduction(bucket) ─→ transport.all_reduce
    end of backward ─→ finish ─ completes, waits in order, hands the gradients back

Buckets are launched strictly in index order whatever order they fill in, so ranks cannot disagree about the order of
collectives. Nothing here looks at the graph: a parameter that took no part is one whose hook did not run by the end.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.collectives.api import Transport, Work
from paceline.collectives.reduction import Reduction, check_goes_over
from paceline.collectives.wait import FutureWork, finish
from paceline.errors import IllegalMove
from paceline.layout import Layout
from paceline.reducer import agreement, autograd, lane_shapes, lane_step
from paceline.reducer.agreement import Vote, Words
from paceline.reducer.backward import Backward, Backwards
from paceline.reducer.bucket import Bucket, BucketState
from paceline.reducer.buckets import BucketSet
from paceline.reducer.graph import GraphMemory
from paceline.reducer.lanes import Lanes
from paceline.reducer.ledger import StepLedger
from paceline.reducer.oversight import Oversight
from paceline.reducer.planning import Planning
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.settle import hand_back, settle
from paceline.reducer.sharing import ParamHooks
from paceline.reducer.slot import GradSlot
from paceline.reducer.turn import Part, Turn
from paceline.reducer.weighting import Division, Weighting
from paceline.trace import Moment, Trace


class Reducer:
    """Keeps the gradients of one replica equal to the mean over all ranks."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: Layout,
        transport: Transport,
        reduction: Reduction,
        settings: ReducerSettings,
        lanes: Lanes | None = None,
    ) -> None:
        check_goes_over(transport, reduction, layout.params[0].device)
        self.transport = transport
        self.reduction = reduction
        self.settings = settings
        self.lanes = lanes
        self.trace = Trace()
        # What the replica switches.
        self.sync_on = True  # no_sync() and disable_grad_sync()
        self.sync_in_join: bool | None = None  # inside join() the forward decides, because it has told the others
        self.divisor: float = self.everyone  # join() may lower it to the ranks that still have data
        self.votes = Vote.NOTHING  # of this rank, told in the next reduction
        self.weighting = Weighting()
        self.optimizes_in_backward = False
        self.after_backward: list[torch.futures.Future[object]] = []  # buffer hooks to wait for
        self.oversight: Oversight | None = None
        self.on_finished: Callable[[], None] | None = None  # restores parameters under mixed precision
        self.on_failed: Callable[[], None] = lambda: None  # a backward that was to be reduced has raised
        # What it may read.
        self.reductions = 0  # begun so far; equal on all ranks
        self.calls = 0  # digest of the buckets launched so far; equal on all ranks
        self.heard: list[Vote] = []  # the votes of all ranks in the last reduction
        self.ledger = StepLedger()
        self.uses: list[int] | None = None  # of the last reduction; None: every parameter on every rank
        self.dropped = False  # whether the last reduction, or the step of lanes that runs, has no gradients to use
        self.ready_order: list[int] = []  # of the last reduction
        self.buckets_reduced = 0  # in the last reduction
        self.graph = GraphMemory()
        self.last_error: str | None = None

        self.lock = threading.RLock()  # a module on several devices has a backward thread for each
        self.backwards = Backwards(self._at_end)
        self.turn = Turn()
        self.set = BucketSet(params, layout)
        self._slot_of = self.set.slot_of
        self.planning = Planning(settings, transport, layout.params[0].device)
        self._hooks = ParamHooks(self)
        if not self._is_alone():
            self.prepare()

    # ---- the way of a gradient

    def on_grad_ready(self, param: torch.Tensor) -> None:
        """Autograd has added to `param.grad`. Runs once per parameter and backward, on the thread of the backward."""
        if torch.is_grad_enabled():  # with create_graph=True; the usual backward does not pay for the switch
            with torch.no_grad():
                return self.on_grad_ready(param)
        with self.lock:
            slot = self._slot_of[id(param)]
            grad = param.grad
            if slot.asleep or grad is None:  # None: autograd delivered an undefined gradient
                return None
            backward = self.backwards.current
            if backward is None or backward.task != autograd.task_id():
                backward = self._enter(autograd.task_id())
            if not backward.delivered:
                if param.grad is None:  # dropped with the gradients of a backward before this one that had failed
                    param.grad = grad
                self._begin(backward)
            slot.used = slot.dirty = True
            if backward.alone:
                self._note_order(slot)  # that is all: see _is_alone
                return None
            bucket = slot.bucket
            if not backward.syncs:
                self._keep_for_later(slot, grad)
            elif bucket.state is BucketState.FLYING:
                slot.late = True  # stays in param.grad until the end; see the note in Bucket.collect
                self.turn.late += 1
            else:
                bucket.collect(slot, grad, backward.scale)
                if not slot.fired:
                    self._note_order(slot)
                    bucket.missing -= 1
                    if bucket.missing == 0:
                        bucket.move(BucketState.FULL)
                        self.trace.stamp(Moment.READY, self.reductions, bucket.spec.index)
                        self._launch()
                if self.set.next > self.set.seen_complete:
                    self._advance()
            return None

    def _note_order(self, slot: GradSlot) -> None:
        if not slot.fired:
            slot.fired = True
            self.ready_order.append(slot.index)
            if self.planning.measures:
                self.planning.note_ready(slot.index)

    def _advance(self) -> None:
        """Let the transport get on with what is in flight, and note what has completed: the proof of overlap."""
        self.transport.progress()
        while (index := self.set.newly_completed()) is not None:
            self.trace.stamp(Moment.COMPLETED, self.reductions, index)
        if self.reduction.chains:
            self._launch()

    def _launch(self) -> None:
        """Start every full bucket whose turn it is."""
        if self.lanes is not None and not self.lanes.last:
            return  # gradients of further lanes are to come
        last = self.set.last
        while self.set.next <= last and self.set.buckets[self.set.next].state is BucketState.FULL:
            if self.reduction.chains and self.set.any_in_flight():
                return  # the collectives of its callbacks and those of the next bucket have no order among them
            bucket = self.set.buckets[self.set.next]
            bucket.move(BucketState.FLYING)
            bucket.complete()
            self.trace.stamp(Moment.LAUNCHED, self.reductions, bucket.spec.index)
            if not bucket.skipped:
                blocks = () if self.lanes is None else self.lanes.blocks(bucket.spec.index, bucket.flat)
                self.calls = hash((self.calls, bucket.key))
                self.turn.broken = True  # until the reduction has returned
                bucket.flight = self.reduction(bucket.grad_bucket(blocks, last=self.set.next == last), self.transport)
                self.turn.broken = False
            self.set.next += 1

    def finish(self) -> None:
        """The backward is over: complete what is missing, wait for everything in order, hand the gradients back.

        Whatever is raised here, the reducer is ready for the next backward afterwards; the gradients of this one are
        gone unless the error says otherwise.
        """
        self.trace.stamp(Moment.BACKWARD_END, self.reductions)
        self.backwards.close()
        self.planning.note_end()
        self.dropped = True  # until it is settled
        try:
            for bucket in self.fill_up():
                self.trace.stamp(Moment.READY, self.reductions, bucket.spec.index)
            self._launch()
            if not self.reduction.chains and not (self.oversight and self.oversight.looks_at_sums):
                self.turn.speak(self)
            for bucket in self.set.buckets:
                self._launch()
                self._land(bucket)
            self.buckets_reduced = sum(not bucket.skipped for bucket in self.set.buckets)
            self.turn.speak(self)
            self._wait(self.turn.words_work, f"the words of backward {self.reductions}")
            words = self.turn.heard()
            if self.lanes is not None:
                lane_shapes.check(words, self.lanes, self.transport, self.settings.timeout_s)
            error = self._settle(words)
        finally:
            self.reset()
        if error is not None:
            self.last_error = str(error)
            raise error

    def fill_up(self) -> list[Bucket]:
        scale = self.weighting.on_the_way_in(self._division())
        return self.set.fill_up(scale, skips_unused=self.settings.skip_unused and self.lanes is None)

    def _land(self, bucket: Bucket) -> None:
        index = bucket.spec.index
        self.trace.stamp(Moment.WAIT_ENTERED, self.reductions, index)
        if bucket.flight is not None:
            self._wait(bucket.flight.work, f"bucket {index} of backward {self.reductions}")
            self._advance()
            bucket.put_result(bucket.flight.land())
        bucket.move(BucketState.LANDED)
        self.trace.stamp(Moment.WAIT_LEFT, self.reductions, index)

    def _settle(self, words: list[Words]) -> Exception | None:
        """All buckets are reduced: apply what the ranks told each other and give the gradients back.

        Returns the error to raise, the same on every rank, once everything is in its place again.
        """
        if self.on_finished is not None:
            self.on_finished()
        if any(row.aborted for row in words):
            self.set.drop_late()
            return None if self.turn.part is Part.ABORTED else agreement.aborted_error(words)
        self.heard = [row.votes for row in words]
        settled = settle(words, self.set, self.transport, self.weighting, self._division(), self.settings)
        self.uses, error, dropped = settled.uses, settled.error, False
        if self.oversight is not None:
            verdict = self.oversight.judge(words, self.set.slots)
            dropped, error = verdict.drops_gradients, verdict.error or error
            if dropped:
                self.uses = [0] * len(self.set.slots)
        if not self.optimizes_in_backward:
            hand_back(self.set, self.uses, lent=self.turn.part is Part.SHADOW)
        self.ledger.reduced()
        if words[0].ready:
            self.planning.after_reduction(self.set, self.ready_order)
        self._wait_for_buffer_hooks()
        if any(row.graph_changed for row in words):
            error = error or self.turn.graph_error or agreement.graph_error(words)
        self.dropped = dropped or error is not None
        return error

    def _wait_for_buffer_hooks(self) -> None:
        for future in self.after_backward:
            self._wait(FutureWork(future), f"a buffer hook of backward {self.reductions}")
        self.after_backward.clear()

    # ---- one backward

    def _enter(self, task: int) -> Backward:
        """The backward that is under way, begun if need be. A backward inside it counts as part of it."""
        if (found := self.backwards.found(task)) is not None:
            return found
        self.abandon()
        self.relay_now()
        alone = self._is_alone()
        if not alone:
            self.prepare()
        syncs = (self.sync_on if self.sync_in_join is None else self.sync_in_join) and self.settings.overlap
        backward = self.backwards.open(task, syncs=syncs, alone=alone)
        self.trace.stamp(Moment.BACKWARD_ENTERED, self.reductions)
        if alone and not self._hooks and backward.adds is not False:
            self._begin(backward)
        return backward

    def _begin(self, backward: Backward) -> None:
        """The first gradient of a backward has come, so it is one that reduces (and not `autograd.grad`)."""
        backward.delivered = True
        if self.lanes is not None:
            lane_step.check_open(self)
        if self.weighting.micros and self.lanes is None:  # lanes begin with empty gradients, and fold what they make
            self.set.forget_thrown_away()
        self.weighting.note_backward()
        backward.scale = self.weighting.on_the_way_in(self._division())
        if not backward.syncs:
            self.ledger.window_open = True
        elif self.lanes is None or self.lanes.last:
            self.begin_reduction()

    def _is_alone(self) -> bool:
        """Whether the mean over all ranks is what autograd has made already.

        Then gradients stay where they are and there are no buckets. Nor are parameters hooked, unless someone wants to
        know which of them took part: a world of one costs nothing over the bare module.
        """
        return (
            self.transport.alone
            and self.reduction.trivial_alone
            and self.weighting.plain
            and self.lanes is None
            and not (self.oversight and self.oversight.looks_at_sums)
            and not self.settings.hold
            and not self.set.laid  # once there are buckets, gradients go through them
        )

    def prepare(self) -> None:
        """Have buckets, and hooks that fill them."""
        if not self.set.laid:
            self.set.lay(self.transport)
        self._hooks.hang()

    def _at_end(self) -> None:
        with self.lock, torch.no_grad():
            backward = self.backwards.current
            if backward is None:
                return
            if backward.alone and not self._hooks:
                if backward.delivered:
                    self._finish_alone(backward)
            elif backward.reduces:
                if not backward.delivered:  # the loss touched no parameter, but the other ranks wait
                    self.begin_reduction() if self.lanes is None else self._begin(backward)
                self.finish() if self.lanes is None else lane_step.close(self)
            elif self.on_finished is not None and backward.delivered:
                self.on_finished()
                self.set.show_all()
            self.backwards.close()
            self.trace.stamp(Moment.BACKWARD_LEFT, self.reductions)

    def _finish_alone(self, backward: Backward) -> None:
        self.trace.stamp(Moment.BACKWARD_END, self.reductions)
        if backward.syncs:
            self._wait_for_buffer_hooks()
            self.ledger.reduced()
            self.reset()
        else:
            self.set.note_unreduced()

    def begin_reduction(self) -> None:
        self.reductions += 1
        self.ready_order = []
        self.planning.begin(self.reductions, chains=self.reduction.chains)
        self.trace.stamp(Moment.BACKWARD_BEGIN, self.reductions)
        if self.oversight is not None and self.lanes is None:  # in lanes the step has begun long ago
            self.oversight.begin(self.reductions)

    def reset(self) -> None:
        if self.set.leave_flying_memory(self.transport) and self.lanes is not None:
            self.lanes.forget_memory()
        self.set.rearm()
        self.weighting.reset()
        self.ledger.closed()
        self.turn = Turn()
        if self.lanes is not None:
            self.lanes.end()

    def _keep_for_later(self, slot: GradSlot, grad: torch.Tensor) -> None:
        weight = self.weighting.current
        if weight is None and not self.settings.hold:
            slot.bucket.stash(slot)
        else:  # shown again when the backward, or the weight() block, ends
            slot.bucket.collect(slot, grad, 1.0 if weight is None else weight)

    def _division(self) -> Division:
        device = self.set.layout.params[0].device
        return Division(self.reduction.divides(self.transport, device), self.transport.size, self.divisor)

    def _wait(self, work: Work, what: str) -> None:
        finish(work, what=what, watch=self.transport.watch, timeout_s=self.settings.timeout_s)

    # ---- what the replica calls

    def before_forward(self, *, grads: bool, training: bool) -> None:
        """Forget a backward that failed, take up a new layout, and note that a step has begun."""
        with self.lock, torch.no_grad():
            if self._hooks:
                if any(slot.asleep for slot in self.set.slots):
                    self._hooks.wake()
            elif self.settings.asks_for_uses or self._hooks.shared() or not self._is_alone():
                self._hooks.hang()
            if self.backwards.failed():
                self.abandon()
            if grads and self.backwards.current is None:
                if not self.reductions:
                    self._hooks.go_last()
                if not self.settings.hold and self.set.follow_parameters(self.settings.caps, self.transport):
                    self.planning.begin_anew(self.layout)
                    lane_step.laid_anew(self)
                self.relay_now()
            if grads and self.sync_on and self.settings.overlap:
                self.ledger.forwards_pending += training
            elif grads:
                self.ledger.window_open = True

    def watch_backward(self, output: torch.Tensor) -> None:
        """Have the backward that goes through `output` end with a reduction, also when its gradients all come from
        nested backwards, or when it touches no parameter."""
        if self._on_output_backward not in (output._backward_hooks or {}).values():  # a module may return its input
            output.register_hook(self._on_output_backward)

    def watch_parameters(self) -> None:
        """Hook the parameters also in a world of one: there is no output whose backward could be watched."""
        self._hooks.hang()

    def _on_output_backward(self, _: torch.Tensor) -> None:
        with self.lock:
            if not all(slot.asleep for slot in self.set.slots):
                self._enter(autograd.task_id())

    def reduce_now(self) -> None:
        """Reduce what has been accumulated so far, without another backward."""
        with self.lock, torch.no_grad():
            if self.backwards.failed():
                self.abandon()
                raise IllegalMove("the last backward ended with an exception, so there are no gradients to reduce")
            if self.backwards.current is not None:
                raise IllegalMove("gradients cannot be reduced while a backward runs; do it after loss.backward()")
            self.relay_now()
            if not self._is_alone():
                self.prepare()
            self.begin_reduction()
            self.finish()

    def skip(self) -> None:
        """Take part in the reduction of this step with what earlier micros have left. If none has, with nothing."""
        with self.lock, torch.no_grad():
            if not self.weighting.micros:
                self.turn.part = Part.SKIPPED
            self.reduce_now()

    def shadow(self) -> None:
        """Take part in a reduction with zeros, and keep the own gradients: a rank without data inside join()."""
        with self.lock, torch.no_grad():
            self.relay_now()
            self.prepare()
            self.begin_reduction()
            self.turn.part = Part.SHADOW
            self.set.lend_all()
            self.finish()

    def abandon(self) -> None:
        """Forget a backward that ended with an exception, and be ready for the next one.

        If it was to be reduced, the other ranks wait for it: its reduction is completed, without gradients, and they
        are told. What earlier backwards have accumulated stays, if this one was only to add to it.
        """
        with self.lock, torch.no_grad():
            backward = self.backwards.close()
            if backward is not None and self.lanes is not None:
                lane_step.abandon(self, backward)
                return
            if backward is None or not backward.reduces:
                return
            self.on_failed()
            if backward.alone and not self._hooks:  # as with the bare module, what it has left stays
                self.ledger.closed()
                return
            if self.turn.broken:  # no collective of ours would fit what the others do; the watch names us to them
                self.reset()
                return
            if not backward.delivered:
                self.begin_reduction()
            self.abort()

    def abort(self) -> None:
        """Complete a reduction that the others wait for, without gradients, and tell them."""
        self.set.drop_gradients()
        self.turn.part = Part.ABORTED
        self.finish()

    def others_wait(self) -> bool:
        """Whether the loss of a training forward touched no parameter here, so that the others still wait."""
        if self.backwards.failed():
            self.abandon()
        return self.sync_on and self.ledger.others_wait(self.set.slots)

    @property
    def in_backward(self) -> bool:
        return self.backwards.current is not None and not self.backwards.failed()

    @property
    def everyone(self) -> int:
        """How many there are to take the mean over: lanes, or ranks."""
        return self.transport.size if self.lanes is None else self.lanes.count

    def relay_now(self) -> bool:
        """Take up the planned layout, if there is one and nothing is under way."""
        with self.lock, torch.no_grad():
            if self.backwards.current is not None or (self.lanes is not None and self.lanes.holds):
                return False
            moved = self.set.move_to_plan(self.transport)
            if moved:
                lane_step.laid_anew(self)
            return moved

    def set_static_graph(self) -> None:
        """Refuse graphs that differ from the first one seen."""
        self.settings = replace(self.settings, static_graph=True)

    @property
    def layout(self) -> Layout:
        return self.set.layout

    def close(self) -> None:
        """Remove every hook. The gradients stay where they are."""
        self._hooks.close()
