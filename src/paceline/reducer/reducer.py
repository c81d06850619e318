"""When buckets fly: from "autograd has a gradient" to "every rank has the mean".

    on_grad_ready ─ counts a bucket down ─→ _launch ─→ reduction(bucket) ─→ transport.all_reduce
    end of backward ─→ send ─ completes and reports ─→ receive ─ waits in order, hands the gradients back

Buckets are launched strictly in index order whatever order they fill in, so ranks cannot disagree about the order of
collectives. Nothing here looks at the graph: a parameter that took no part is one whose hook did not run by the end.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.collectives.api import Transport, Work
from paceline.collectives.event_work import EventWork
from paceline.collectives.group import Group
from paceline.collectives.reduction import Reduction, check_goes_over
from paceline.collectives.watcher import Watcher
from paceline.errors import BackwardAborted, IllegalMove, PacelineError
from paceline.layout import Layout
from paceline.reducer import autograd, lane_step, taking_part
from paceline.reducer.autograd import task_id
from paceline.reducer.backward import NO_TASK, TWO_THREADS, Backward, Backwards, Settlement, beside
from paceline.reducer.bucket import Bucket, BucketState
from paceline.reducer.buckets import BucketSet
from paceline.reducer.exchange import DeviceReports, PendingReports
from paceline.reducer.graph import GraphMemory
from paceline.reducer.hearing import hear, send_report, wait_for_buffer_hooks
from paceline.reducer.lanes import Lanes
from paceline.reducer.ledger import StepLedger
from paceline.reducer.oversight import Oversight
from paceline.reducer.planning import Planning
from paceline.reducer.report import Abort, Vote
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.sharing import ParamHooks
from paceline.reducer.slot import GradSlot
from paceline.reducer.turn import Turn
from paceline.reducer.weighting import Division, Weighting, check_unweighted, resume_step
from paceline.trace import Moment, Trace


class Reducer:
    """Keeps the gradients of one replica equal to the mean over all ranks."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: Layout,
        group: Group,
        reduction: Reduction,
        settings: ReducerSettings,
        lanes: Lanes | None = None,
    ) -> None:
        check_goes_over(group.transport, reduction, layout.params[0].device)
        self.group = group
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
        self.heard: list[Vote] = []  # the votes of all ranks in the last reduction whose reports were read
        self.ledger = StepLedger()
        self.uses: list[int] | None = None  # of the last reduction; None: every parameter on every rank
        self.dropped = False  # whether the last reduction, or the step of lanes that runs, has no gradients to use
        self.ready_order: list[int] = []  # of the last reduction
        self.buckets_reduced = 0  # in the last reduction
        self.graph = GraphMemory()
        self.last_error: str | None = None
        self.refused: Callable[[], Exception] | None = None  # for backwards until there is a forward: others have none

        self.lock = threading.RLock()  # a module on several devices has a backward thread for each
        self.backwards = Backwards(self._at_end, on_host=all(meta.device.type == "cpu" for meta in layout.params))
        self.turn = Turn()
        self.set = BucketSet(params, layout)
        self.scale = 1.0  # by what gradients are multiplied on their way into a bucket
        self.device = layout.params[0].device
        self.unheard: deque[PendingReports] = deque()  # sent, and not read yet
        self._slot_of = self.set.slot_of
        self._polls = False  # whether work goes on only when it is asked for
        self.device_reports = DeviceReports(self.device)
        self._one_device = all(meta.device == self.device for meta in layout.params)
        self._unsettled: Settlement | None = None  # has sent, and not received
        self.watcher = Watcher(group)
        self.planning = Planning(settings, group, self.device)
        self.hooks = ParamHooks(self)
        if not self.is_alone():
            self.prepare()

    @property
    def transport(self) -> Transport:
        return self.group.transport

    @property
    def ordered_by_streams(self) -> bool:
        """Whether the host need not wait for what is reduced: to wait for a collective orders a stream."""
        return self._one_device and self.device.type == "cuda" and self.transport.queues(self.device)

    # ---- the way of a gradient

    def on_grad_ready(self, param: torch.Tensor) -> None:
        """Autograd has added to `param.grad`. Runs once per parameter and backward, on the thread of the backward."""
        slot = self._slot_of[id(param)]
        if self.backwards.counting == task_id() and slot.only_counts():
            self.ready_order.append(slot.index)
            return None
        if torch.is_grad_enabled():  # with create_graph=True; the usual backward does not pay for the switch
            with torch.no_grad():
                return self.on_grad_ready(param)
        with self.lock:
            if slot.asleep or param.grad is None:  # None: autograd delivered an undefined gradient
                return None
            backward = self.backwards.current
            if backward is None or not backward.delivered or backward.task != task_id():
                backward = self._first_gradient(task_id(), param)
            slot.used = slot.dirty = True
            awaits = len(param._post_accumulate_grad_hooks) > 1 and not self.hooks.runs_last(slot)
            usual = backward.syncs and not (awaits or backward.alone or slot.fired)
            if not usual or slot.bucket.state is not BucketState.FILLING:
                return self._unusual(slot, backward, awaits=awaits)
            bucket = slot.bucket
            slot.fired = True
            self.ready_order.append(slot.index)
            if self.planning.measures:
                self.planning.note_ready(slot.index)
            if bucket.arrive(slot, self.scale):
                bucket.collect(self.scale)
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.move(BucketState.FULL)
                self.trace.stamp(Moment.READY, self.reductions, bucket.spec.index)
                self._launch()
            if self._polls and self.set.next > self.set.seen_complete:
                self._advance()
            busy = self.planning.measures or (self._polls and self.set.next > self.set.seen_complete)
            self.backwards.counting = NO_TASK if busy or not self._one_device else backward.task
            return None

    def _unusual(self, slot: GradSlot, backward: Backward, *, awaits: bool) -> None:
        """A gradient that does not count its bucket down: a second one, one of a backward that only adds, or one that
        `awaits` hooks of the user's, which run after this one and may change it."""
        if backward.alone:  # that is all: see is_alone
            if not slot.fired:
                slot.fired = True
                self.ready_order.append(slot.index)
            return
        bucket = slot.bucket
        if bucket.state is BucketState.FLYING:
            slot.late = True  # stays in param.grad until the end; see the note in Bucket
            self.turn.late += 1
            return
        flush = bucket.arrive(slot, self.scale) or (not backward.syncs and len(bucket.arrived) == len(bucket.slots))
        if flush and not awaits:
            bucket.keep(self.scale, held=backward.syncs or self._holds)

    @property
    def _holds(self) -> bool:
        """Whether autograd must not add to unreduced gradients, because they are weighted or of another type."""
        return self.weighting.current is not None or self.settings.hold

    def _first_gradient(self, task: int, param: torch.Tensor) -> Backward:
        """The first gradient of a backward, or of one nested in it, has come."""
        grad = param.grad
        if self.weighting.micros and self.weighting.current is not None and self.backwards.current is None:
            check_unweighted(self._slot_of[id(param)])
        backward = self._enter(task)
        if not backward.delivered:
            if param.grad is None:  # dropped with the gradients of a backward before this one that had failed
                param.grad = grad
            self._begin(backward)
        return backward

    def _advance(self) -> None:
        """Let the transport get on with what is in flight, and note what has completed: the proof of overlap."""
        self.transport.progress()
        self._note_completed()
        if self.reduction.chains:
            self._launch()

    def _note_completed(self) -> None:
        while (index := self.set.newly_completed()) is not None:
            self.trace.stamp(Moment.COMPLETED, self.reductions, index)

    def _launch(self) -> None:
        """Start every full bucket whose turn it is."""
        if self.lanes is not None and not self.lanes.last:
            return  # gradients of further lanes are to come
        last = self.set.last
        while self.set.next <= last and self.set.buckets[self.set.next].state is BucketState.FULL:
            if self.reduction.chains and self.set.any_in_flight():
                return  # the collectives of its callbacks and those of the next bucket have no order among them
            bucket = self.set.buckets[self.set.next]
            bucket.complete(self.scale)
            bucket.move(BucketState.FLYING)
            self.trace.stamp(Moment.LAUNCHED, self.reductions, bucket.spec.index)
            if not bucket.skipped:
                blocks = () if self.lanes is None else self.lanes.blocks(bucket.spec.index, bucket.flat)
                self.calls = hash((self.calls, bucket.key))
                if self.oversight is not None and self.oversight.looks_at_sums:
                    self.oversight.look_at_own([part for _, part in blocks] or [bucket.flat])
                self.turn.broken = True  # until the reduction has returned
                bucket.flight = self.reduction(bucket.grad_bucket(blocks, last=self.set.next == last), self.transport)
                self.turn.broken = False
            self.set.next += 1
            if bucket.on_host and not self._polls:
                self._note_completed()

    # ---- the end of a backward

    def finish(self) -> None:
        """The backward is over: send what is missing, receive everything in order, hand the gradients back."""
        self._send()
        self.receive()

    def _send(self) -> None:
        """Have on its way all that the other ranks need."""
        self.trace.stamp(Moment.BACKWARD_END, self.reductions)
        self.backwards.close()
        if self.planning.measures:
            self.planning.note_end()
        self.dropped = True  # until it is settled
        try:
            for bucket in self.fill_up():
                self.trace.stamp(Moment.READY, self.reductions, bucket.spec.index)
            self._launch()
            looks_at_sums = self.oversight is not None and self.oversight.looks_at_sums
            if not (self.reduction.chains or self.ordered_by_streams or looks_at_sums):
                send_report(self)
        except BaseException:
            self.reset()
            raise

    def receive(self) -> None:
        """Wait for what the others have sent, and give the gradients back. Whatever is raised, the reducer is ready for
        the next backward; the gradients of this one are gone unless the error says so."""
        self._unsettled = None
        beside.discard(self)
        if self.ordered_by_streams and not torch.cuda.is_current_stream_capturing():
            self.turn.computed = EventWork(torch.cuda.current_stream(self.device).record_event())
        try:
            self._land()
            self.buckets_reduced = sum(not bucket.skipped for bucket in self.set.buckets)
            if self.turn.sent is None:
                send_report(self)
            error = hear(self)
        finally:
            self.reset()
        if error is not None:
            self.last_error = str(error)
            raise error

    def fill_up(self) -> list[Bucket]:
        self.scale = self.weighting.on_the_way_in(self.division())
        return self.set.fill_up(self.scale, skips_unused=self.settings.skip_unused and self.lanes is None)

    def _land(self) -> None:
        """Wait for the buckets in order, and have their results in them."""
        for bucket in self.set.buckets:
            self._launch()
            if bucket.state is BucketState.LANDED:
                continue
            index = bucket.spec.index
            self.trace.stamp(Moment.WAIT_ENTERED, self.reductions, index)
            if bucket.flight is not None:
                if not (self.ordered_by_streams and bucket.flight.work.wait(0.0)):
                    self.wait(bucket.flight.work, f"bucket {index} of backward {self.reductions}")
                    self._advance()
                bucket.put_result(bucket.flight.land())
            bucket.move(BucketState.LANDED)
            self.trace.stamp(Moment.WAIT_LEFT, self.reductions, index)

    # ---- one backward

    def _enter(self, task: int) -> Backward:
        """The backward that is under way, begun if need be. A backward inside it counts as part of it."""
        if (found := self.backwards.found(task)) is not None:
            if found.task != task and found.met_another:
                raise IllegalMove(TWO_THREADS)
            return found
        if (due := self._unsettled) is not None and due.is_own(self.lock, lambda: self._unsettled is due):
            self.receive()
        self.set.forget_arrived() if self.backwards.current is None else self.abandon()
        if self.refused is not None:
            raise self.refused()
        self.relay_now()
        if self.weighting.micros:
            resume_step(self)
        alone = self.is_alone()
        if not alone:
            self.prepare()
        syncs = (self.sync_on if self.sync_in_join is None else self.sync_in_join) and self.settings.overlap
        backward = self.backwards.open(task, syncs=syncs, alone=alone)
        self._polls = self.transport.inline or self.reduction.chains
        self.trace.stamp(Moment.BACKWARD_ENTERED, self.reductions)
        if alone and not self.hooks and backward.adds is not False:
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
        self.scale = self.weighting.on_the_way_in(self.division())
        if not backward.syncs:
            self.ledger.window_open = True
        elif self.lanes is None or self.lanes.last:
            self.begin_reduction()

    def is_alone(self) -> bool:
        """Whether the mean over all ranks is what autograd has made already.

        Then gradients stay where they are and there are no buckets. Nor are parameters hooked, unless someone wants to
        know which of them took part: a world of one costs nothing over the bare module.
        """
        return (
            self.transport.alone
            and self.reduction.trivial_alone
            and self.weighting.plain
            and self.lanes is None
            # On a device the update is gated instead: see replica/gate.py.
            and not (self.oversight and self.oversight.looks_at_sums and self.device.type == "cpu")
            and not self.settings.hold
            and not self.set.laid  # once there are buckets, gradients go through them
        )

    def prepare(self) -> None:
        """Have buckets, and hooks that fill them."""
        if not self.set.laid:
            self.set.lay(self.transport)
        self.hooks.hang()

    def _at_end(self) -> None:
        """Autograd has produced the last gradient. See `reducer.backward.beside` for why this is done in two parts."""
        with self.lock, torch.no_grad():
            backward = self.backwards.current
            if backward is None:
                return
            if backward.met_another:
                self.turn.abort = Abort.THREADS
                self.abandon()
                raise BackwardAborted(TWO_THREADS, ranks=[self.transport.rank])
            if backward.alone and not self.hooks:
                if backward.delivered:
                    self._finish_alone(backward)
            elif backward.reduces:
                if not backward.delivered:  # the loss touched no parameter, but the other ranks wait
                    self.begin_reduction() if self.lanes is None else self._begin(backward)
                if self.lanes is None or lane_step.close(self):
                    self._send()
                    running = autograd.at_end_of_backward(self._at_very_end)
                    self._unsettled = Settlement(running, threading.get_ident())
                    beside.add(self)
                    return
            elif backward.delivered:
                self._end_unreduced()
            self.backwards.close()
            self.trace.stamp(Moment.BACKWARD_LEFT, self.reductions)

    def _at_very_end(self) -> None:
        with self.lock, torch.no_grad():
            if self._unsettled is not None:
                try:
                    self.receive()
                except PacelineError:
                    taking_part.discard_others(self)
                    raise
                self.trace.stamp(Moment.BACKWARD_LEFT, self.reductions)

    def _end_unreduced(self) -> None:
        """A backward that only adds to the gradients is over."""
        self.set.keep(self.scale, held=self._holds)
        if self.on_finished is not None:
            self.on_finished()
        if self._holds:  # until the next backward, so that zero_grad() can throw them away
            self.set.show_all()

    def progress(self) -> None:
        """Do what the other ranks wait for, while this one waits for something else."""
        if self._polls:
            self._advance()
        if self.turn.sent is None and self.set.next > self.set.last and not self.set.any_in_flight():
            self._land()
            send_report(self)

    def _finish_alone(self, backward: Backward) -> None:
        self.trace.stamp(Moment.BACKWARD_END, self.reductions)
        if backward.syncs:
            wait_for_buffer_hooks(self)
            self.ledger.reduced()
            self.reset()
        else:
            self.set.note_unreduced()

    def begin_reduction(self) -> None:
        self.reductions += 1
        self.ready_order = []
        if not self.planning.over:
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

    def division(self) -> Division:
        return Division(self.reduction.divides(self.transport, self.device), self.transport.size, self.divisor)

    def wait(self, work: Work, what: str) -> None:
        self.group.wait(work, what, beside.of(self))

    # ---- what the replica calls

    def before_forward(self, *, grads: bool, training: bool) -> None:
        """Forget a backward that failed, take up a new layout, and note that a step has begun."""
        with self.lock, torch.no_grad():
            if self.watcher.error is not None:
                raise self.watcher.error
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self.watcher.forget()
            if self.hooks:
                self.hooks.follow_swaps()
                if grads and any(slot.asleep for slot in self.set.slots):
                    self.hooks.wake()
            elif self.settings.asks_for_uses or self.hooks.shared() or not self.is_alone():
                self.hooks.hang()
            if self.backwards.failed():
                self.abandon()
            if self._unsettled is not None and self._unsettled.running() is None:
                taking_part.discard_unsettled(self)
            self.refused = None
            if grads and self.backwards.current is None:
                if not self.settings.hold and self.set.follow_parameters(self.settings.caps, self.transport):
                    self.planning.begin_anew(self.set.layout, self.reductions)
                    lane_step.laid_anew(self)
                self.relay_now()
            if grads and self.sync_on and self.settings.overlap:
                self.ledger.forwards_pending += training
                beside.note_called(self)
            elif grads:
                self.ledger.window_open = True

    def on_output_backward(self, _: torch.Tensor) -> None:
        """A backward has come to an output of the replica: see `ParamHooks.watch_output`."""
        with self.lock:
            if not all(slot.asleep for slot in self.set.slots):
                self._enter(task_id())

    def abandon(self) -> None:
        taking_part.abandon(self)

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
            if moved := self.set.move_to_plan(self.transport):
                lane_step.laid_anew(self)
            return moved
