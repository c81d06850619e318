"""When gradients are reduced: from "autograd has a gradient" to "every rank has the mean".

    on_grad_ready ─ counts a bucket down ─→ Schedule.launch ─→ reduction(bucket) ─→ transport.all_reduce
    end of backward ─→ _send (pad, launch, report) ─→ receive (wait in order, read reports, publish gradients)

The graph is not traversed: a parameter is unused if its hook did not run by the end.
"""

import threading
from collections.abc import Callable

import torch

from paceline.collectives.group import Group
from paceline.collectives.protocols import Transport, Work
from paceline.collectives.reduction_protocol import Reduction, check_goes_over
from paceline.collectives.wait import EventWork, FutureWork
from paceline.errors import IllegalMove, PacelineError
from paceline.reducer import autograd, participation
from paceline.reducer.autograd import Backward, Backwards, ParamHooks, pending_reducers, task_id
from paceline.reducer.bucket import Bucket, BucketState
from paceline.reducer.buckets import BucketSet, Schedule
from paceline.reducer.callbacks import BackwardCallbacks
from paceline.reducer.device_reports import DeviceReports
from paceline.reducer.lane_batch import LaneBatch
from paceline.reducer.lanes import Lanes
from paceline.reducer.planning import Planning
from paceline.reducer.report import Contribution, ReportExchange, StepRole
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.settle import Settled, is_aborted, publish_grads, settle
from paceline.reducer.settle_late import error_of_earlier, settle_unread
from paceline.reducer.shared_params import has_shared
from paceline.reducer.static_graph import GraphMemory
from paceline.reducer.step import Division, RankBatch, StepState, Weighting
from paceline.reducer.step_observer import Findings
from paceline.reducer.unreduced import add_without_counting, end_alone, end_unreduced
from paceline.reducer.weighting import check_unweighted, resume_step
from paceline.trace import Moment, Trace


class Reducer:
    """Keeps the gradients of one replica equal to the mean over all ranks."""

    def __init__(
        self,
        buckets: BucketSet,
        group: Group,
        reduction: Reduction,
        settings: ReducerSettings,
        callbacks: BackwardCallbacks,
        lanes: Lanes | None,
        trace: Trace,
    ) -> None:
        layout = buckets.layout
        check_goes_over(group.transport, reduction, layout.params[0].device)
        self.group = group
        self.settings = settings
        self.callbacks = callbacks
        self.trace = trace
        self.bucket_set = buckets
        self.schedule = Schedule(self.bucket_set, group, reduction, self.trace, self.wait)
        self.batch: RankBatch | LaneBatch = RankBatch(self) if lanes is None else LaneBatch(self, lanes)
        self.schedule.batch = self.batch
        # Set by the replica.
        self.sync_on = True  # no_sync() and disable_grad_sync()
        self.sync_in_join: bool | None = None  # inside join() the forward decides, because it has informed the others
        self.divisor: float = self.batch.count  # join() may lower it to the ranks that still have data
        self.weighting = Weighting()
        self.optimizes_in_backward = False
        self.after_backward: list[torch.futures.Future[object]] = []  # buffer hooks to wait for
        # Read by the replica.
        self.step_state = StepState()
        self.uses: list[int] | None = None  # of the last reduction; None: every parameter on every rank
        self.ready_order: list[int] = []  # of the last reduction
        self.buckets_reduced = 0  # in the last reduction
        self.graph = GraphMemory()
        self.last_error: str | None = None
        self.refused: Callable[[], Exception] | None = None  # the error for backwards until the next forward
        self.lock = threading.RLock()  # a module on several devices has a backward thread for each
        self.backwards = Backwards(self._at_end, on_host=all(meta.device.type == "cpu" for meta in layout.params))
        self.contribution = Contribution()
        self.device = layout.params[0].device
        self._slot_of = self.bucket_set.slot_of
        self._one_device = all(meta.device == self.device for meta in layout.params)
        self._pending_receive: autograd.PendingReceive | None = None  # set after sending, until received
        on_device = DeviceReports(self.device) if self.device.type == "cuda" else None
        self.reports = ReportExchange(group, on_device)
        self.planning = Planning(settings, group, self.device)
        self.hooks = ParamHooks(self)
        if not self.is_alone():
            self.prepare()

    @property
    def transport(self) -> Transport:
        return self.group.transport

    @property
    def reductions_begun(self) -> int:
        """Also the number of the reduction that runs, or ran last: equal on all ranks."""
        return self.schedule.reductions_begun

    # ---- the path of a gradient

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
            if slot.owned_elsewhere or param.grad is None:  # None: autograd delivered an undefined gradient
                return None
            backward = self.backwards.current
            if backward is None or not backward.delivered or backward.task != task_id():
                backward = self._first_gradient(task_id(), param)
            slot.used = slot.dirty = True
            user_hooks_pending = len(param._post_accumulate_grad_hooks) > 1 and not self.hooks.runs_last(slot)
            usual = backward.syncs and not (user_hooks_pending or backward.alone or slot.fired)
            if not usual or slot.bucket.state is not BucketState.FILLING:
                return add_without_counting(self, slot, backward, user_hooks_pending=user_hooks_pending)
            bucket, schedule = slot.bucket, self.schedule
            slot.fired = True
            self.ready_order.append(slot.index)
            if self.planning.measures:
                self.planning.note_ready(slot.index)
            if bucket.arrive(slot, schedule.scale):
                bucket.collect(schedule.scale)
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.move(BucketState.FULL)
                self.trace.stamp(Moment.READY, schedule.reductions_begun, bucket.spec.index)
                schedule.launch()
            if schedule.polls and schedule.outstanding:
                schedule.advance()
            busy = self.planning.measures or (schedule.polls and schedule.outstanding)
            self.backwards.counting = autograd.NO_TASK if busy or not self._one_device else backward.task
            return None

    def _first_gradient(self, task: int, param: torch.Tensor) -> Backward:
        """The first gradient of a backward, or of one nested in it, has arrived."""
        grad = param.grad
        if self.weighting.microbatches and self.weighting.current is not None and self.backwards.current is None:
            check_unweighted(self._slot_of[id(param)])
        backward = self._enter(task)
        if not backward.delivered:
            if param.grad is None:  # dropped with the gradients of an earlier, failed backward
                param.grad = grad
            self.begin(backward)
        return backward

    # ---- the end of a backward

    def finish(self) -> None:
        self._send()
        self.receive()

    def _send(self) -> None:
        """Send everything that the other ranks need."""
        self.trace.stamp(Moment.BACKWARD_END, self.reductions_begun)
        self.backwards.close()
        if self.planning.measures:
            self.planning.note_end()
        try:
            for bucket in self.pad_missing():
                self.trace.stamp(Moment.READY, self.reductions_begun, bucket.spec.index)
            self.schedule.launch()
            schedule, late = self.schedule, self.settings.report_last
            if not (late or schedule.one_after_another or schedule.stream_ordered or schedule.looks_at_sums):
                self._send_report()
        except BaseException:
            self.reset()
            raise

    def receive(self) -> None:
        """Wait for the other ranks' data, and publish the gradients. Whatever is raised, the reducer is ready for
        the next backward; the gradients of this one are dropped unless the error says otherwise."""
        self._pending_receive = None
        pending_reducers.discard(self)
        if self.schedule.stream_ordered and not torch.cuda.is_current_stream_capturing():
            self.contribution.computed = EventWork(torch.cuda.current_stream(self.device).record_event())
        try:
            self.schedule.wait_results()
            self.buckets_reduced = sum(not bucket.skipped for bucket in self.bucket_set.buckets)
            if self.contribution.sent is None:
                self._send_report()
            error = self._read_reports()
        finally:
            self.reset()
        if error is not None:
            self.last_error = str(error)
            raise error

    def pad_missing(self) -> list[Bucket]:
        self.schedule.scale = self.weighting.scale_in(self.division())
        skips = self.settings.skip_unused and not self.batch.has_lanes
        return self.bucket_set.pad_missing(self.schedule.scale, skips_unused=skips)

    # ---- reports

    def _send_report(self) -> None:
        """Send this rank's report. A step that is captured into a CUDA graph sends none: its replays would send the
        same one again."""
        on_device = self.schedule.stream_ordered
        if on_device and torch.cuda.is_current_stream_capturing():
            return
        observer = self.schedule.observer
        found = Findings() if observer is None else observer.findings(self.bucket_set.results(), on_device=on_device)
        contribution = self.contribution
        told = contribution.report(self, found)
        contribution.sent = self.reports.send(told, found, on_device=on_device, computed=contribution.computed)
        contribution.sent.graph_error = contribution.graph_error

    def _read_reports(self) -> Exception | None:
        """Read the reports that are due, and publish the gradients. Returns the error that all ranks raise.

        On a host, which waits for the sums anyway, and until buckets are planned, those of this reduction are due;
        if streams order collectives, those of the previous one. A step that a CUDA graph captures has none.
        """
        mine = self.contribution.sent
        if mine is None:
            return self._give_back(settle_unread(self, None))
        error: Exception | None = None
        later = self.schedule.stream_ordered and self.planning.learning_over and self.sync_in_join is None
        for found, rows in self.reports.read(mine, self.wait, later=later):
            if not is_aborted(rows):
                self.reports.gathered_votes = [row.votes for row in rows]
            if error is None:
                error = self._give_back(settle(self, rows)) if found is mine else error_of_earlier(self, rows, found)
        return (self._give_back(settle_unread(self, mine)) if later else None) or error

    def _give_back(self, settled: Settled) -> Exception | None:
        """Set every parameter's gradient, unless no rank has any. Returns the error to raise."""
        if settled.refuses is not None:
            self.refused = settled.refuses
        if settled.aborted:
            return settled.error
        self.uses = settled.uses
        if not self.optimizes_in_backward:
            publish_grads(self.bucket_set, self.uses, lent=self.contribution.role is StepRole.EMPTY)
        self.step_state.reduced(usable=not settled.dropped and settled.error is None)
        if settled.plans:
            self.planning.after_reduction(self.bucket_set, self.ready_order)
        self.wait_for_buffer_hooks()
        return settled.error

    def wait_for_buffer_hooks(self) -> None:
        for future in self.after_backward:
            self.wait(FutureWork(future), f"a buffer hook of backward {self.reductions_begun}")
        self.after_backward.clear()

    # ---- one backward

    def _enter(self, task: int) -> Backward:
        """The current backward, begun if necessary. A nested backward counts as part of it."""
        if (found := self.backwards.found(task)) is not None:
            if found.task != task and found.met_another:
                raise IllegalMove(participation.TWO_THREADS)
            return found
        if (due := self._pending_receive) is not None and due.is_own(self.lock, lambda: self._pending_receive is due):
            self.receive()
        self.bucket_set.forget_arrived() if self.backwards.current is None else participation.abandon(self)
        if self.refused is not None:
            raise self.refused()
        self.apply_pending_layout()
        if self.weighting.microbatches:
            resume_step(self)
        alone = self.is_alone()
        if not alone:
            self.prepare()
        self.bucket_set.begin_backward()
        syncs = (self.sync_on if self.sync_in_join is None else self.sync_in_join) and self.settings.overlap
        backward = self.backwards.open(task, syncs=syncs, alone=alone)
        self.schedule.begin()
        self.trace.stamp(Moment.BACKWARD_ENTERED, self.reductions_begun)
        if alone and not self.hooks and backward.adds is not False:
            self.begin(backward)
        return backward

    def begin(self, backward: Backward) -> None:
        """The first gradient of a backward has arrived, so it is one that reduces (and not `autograd.grad`)."""
        backward.delivered = True
        self.batch.begin_backward()
        self.weighting.note_backward()
        self.schedule.scale = self.weighting.scale_in(self.division())
        if not backward.syncs:
            self.step_state.window_open = True
        elif self.batch.last:
            self.begin_reduction()

    def is_alone(self) -> bool:
        """Whether autograd's gradients already are the mean over all ranks. Then there are no buckets, and no hooks
        either, unless it is needed which parameters took part: a world of one costs nothing."""
        return (
            self.group.single
            and self.schedule.reduction.trivial_alone
            and self.weighting.plain
            and not self.batch.has_lanes
            # On a device the update is gated instead: see replica/gate.py.
            and not (self.schedule.looks_at_sums and self.device.type == "cpu")
            and not self.settings.hold
            and not self.bucket_set.allocated  # existing buckets remain in use
        )

    def prepare(self) -> None:
        """Create the buckets, and the hooks that fill them."""
        if not self.bucket_set.allocated:
            self.bucket_set.allocate(self.transport)
        self.hooks.register()

    def _at_end(self) -> None:
        """Autograd has produced the last gradient. Why this is done in two parts: see `PendingReducers`."""
        with self.lock, torch.no_grad():
            backward = self.backwards.current
            if backward is None:
                return
            if backward.met_another:
                participation.fail_in_two_threads(self)
            if backward.alone and not self.hooks:
                if backward.delivered:
                    end_alone(self, backward)
            elif backward.reduces:
                if not backward.delivered:  # the loss touched no parameter, but the other ranks wait
                    self.batch.begin_untouched(backward)
                if self.batch.end_backward():
                    self._send()
                    running = autograd.at_end_of_backward(self._at_very_end)
                    self._pending_receive = autograd.PendingReceive(running, threading.get_ident())
                    pending_reducers.add(self)
                    return
            elif backward.delivered:
                end_unreduced(self)
            self.backwards.close()
            self.trace.stamp(Moment.BACKWARD_LEFT, self.reductions_begun)

    def _at_very_end(self) -> None:
        with self.lock, torch.no_grad():
            if self._pending_receive is not None:
                try:
                    self.receive()
                except PacelineError:
                    participation.discard_others(self)
                    raise
                self.trace.stamp(Moment.BACKWARD_LEFT, self.reductions_begun)

    def progress(self) -> None:
        """Make progress on collectives that other ranks wait for, while this rank waits for something else."""
        if self.schedule.polls:
            self.schedule.advance()
        if self.contribution.sent is None and self.schedule.launched_all and not self.schedule.busy_after_advancing():
            self.schedule.wait_results()
            self._send_report()

    def begin_reduction(self, role: StepRole = StepRole.FULL) -> None:
        """A reduction begins, in which this rank takes part as `role` says."""
        self.schedule.reductions_begun += 1
        self.contribution.role = role
        self.ready_order = []
        if not self.planning.over:
            self.planning.begin(self.reductions_begun, multi_step=self.schedule.reduction.multi_step)
        self.trace.stamp(Moment.BACKWARD_BEGIN, self.reductions_begun)
        self.batch.begin_reduction()

    def reset(self) -> None:
        self.batch.reset(memory_lost=self.bucket_set.replace_launched_memory(self.transport))
        self.bucket_set.rearm()
        self.schedule.rearm()
        self.weighting.reset()
        self.step_state.closed()
        self.contribution = Contribution()

    def division(self) -> Division:
        return Division(self.schedule.reduction.divides(self.transport, self.device), self.transport.size, self.divisor)

    def wait(self, work: Work, what: str) -> None:
        self.group.wait(work, what, pending_reducers.of(self))

    # ---- called by the replica

    def before_forward(self, *, grads: bool, training: bool) -> None:
        """Forget a backward that failed, switch to a new layout, and note that a step has begun."""
        with self.lock, torch.no_grad():
            self.reports.raise_watcher_error()
            if self.hooks:
                self.hooks.follow_swaps(takes_over=grads)
            elif self.settings.asks_for_uses or has_shared(self) or not self.is_alone():
                self.hooks.register()
            if self.backwards.failed():
                participation.abandon(self)
            if self._pending_receive is not None and self._pending_receive.running() is None:
                participation.receive_and_discard(self)
            self.refused = None if task_id() == -1 else self.refused  # a checkpoint repeats a forward inside a backward
            if grads and self.backwards.current is None:
                if not self.settings.hold and self.bucket_set.follow_parameters(self.settings.caps, self.transport):
                    self.planning.begin_anew(self.bucket_set.layout, self.reductions_begun)
                    self.batch.memory_moved()
                self.apply_pending_layout()
            if grads and self.sync_on and self.settings.overlap:
                self.step_state.forwards_pending += training
                pending_reducers.note_called(self)
            elif grads:
                self.step_state.window_open = True

    def on_output_backward(self, _: torch.Tensor) -> None:
        """A backward has reached an output of the replica: see `ParamHooks.watch_output`."""
        with self.lock:
            if not all(slot.owned_elsewhere for slot in self.bucket_set.slots):
                self._enter(task_id())

    def others_wait(self) -> bool:
        """Whether the loss of a training forward touched no parameter here, so that the other ranks still wait."""
        if self.backwards.failed():
            participation.abandon(self)
        return self.sync_on and not self.batch.has_lanes and self.step_state.others_wait(self.bucket_set.slots)

    def apply_pending_layout(self) -> bool:
        """Switch to the planned layout, if there is one and nothing is under way."""
        with self.lock, torch.no_grad():
            if self.backwards.current is not None or self.batch.holds:
                return False
            if moved := self.bucket_set.relayout(self.transport):
                self.batch.memory_moved()
            return moved
