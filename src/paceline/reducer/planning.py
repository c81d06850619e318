"""Which gradients share a bucket: learnt from the first backwards, and agreed by all ranks.

    reduction 1      the order in which gradients become ready; buckets are laid out in it
    reduction 3      when each becomes ready, and what a reduction costs here; buckets are cut to end first

Where the computing thread reduces by itself, times matter little and the plan is made after reduction 1 already. Rank 0
decides, all take up the new layout at the next step. With torch's size arguments only the order is learnt.
"""

import time
from collections.abc import Sequence

import torch

from paceline.bucket_plan import Cost, Plan, ReadyCurve, decode_groups, encode_groups, fit_cost, plan_boundaries
from paceline.collectives.api import Transport, Work
from paceline.collectives.wait import finish
from paceline.layout import MIB, Layout, lay_groups, plan_layout
from paceline.reducer.buckets import BucketSet
from paceline.reducer.settings import ReducerSettings

PLAN_AT = 3  # the first backwards are slower than those that follow: memory and kernels are new
PROBED_BYTES = (MIB // 4, 4 * MIB)
PROBED_BYTES_ON_DEVICE = (2 * MIB, 32 * MIB)
PROBES = 4


class Planning:
    """Finds the buckets of one replica."""

    def __init__(self, settings: ReducerSettings, transport: Transport, device: torch.device) -> None:
        self._settings = settings
        self._transport = transport
        self._device = device
        self._clock = ReadyClock(device)
        self.order_learned = False
        self.plan: Plan | None = None
        self.measures = False  # the times of the backward that runs are wanted

    def begin(self, number: int, *, chains: bool) -> None:
        """Reduction `number` begins. One that `chains` may keep state by bucket, so its buckets are not cut anew."""
        wanted = self._settings.plans_buckets and self._transport.size > 1 and self.plan is None and not chains
        self.measures = wanted and (self._transport.inline or number >= PLAN_AT)
        if self.measures:
            self._clock.begin()

    def note_ready(self, param: int) -> None:
        self._clock.note(param)

    def note_end(self) -> None:
        if self.measures:
            self._clock.end()

    def after_reduction(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        """All ranks call it after a reduction in which rank 0 saw gradients become ready."""
        if self.measures:
            self._plan(buckets, ready_order)
        elif not self.order_learned:
            self._learn_order(buckets, ready_order)
        self.measures = False

    def _learn_order(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        order = torch.tensor(_whole_order(buckets.layout, ready_order), dtype=torch.int64)
        self._wait(self._transport.broadcast(order, 0), "the order of gradients")
        buckets.plan(plan_layout(buckets.layout.params, order.tolist(), self._settings.caps))
        self.order_learned = True

    def _plan(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        params = buckets.layout.params
        curve = self._clock.curve(buckets.layout, _whole_order(buckets.layout, ready_order))
        cost = self._probe()
        plan = plan_boundaries(curve, cost)
        agreed = torch.tensor(encode_groups(plan.groups), dtype=torch.int64)
        self._wait(self._transport.broadcast(agreed, 0), "the bucket plan")
        groups = decode_groups(agreed.tolist(), len(params))
        self.plan = Plan.of(groups, curve, cost)
        buckets.plan(lay_groups(params, groups))
        self.order_learned = True

    def _probe(self) -> Cost:
        """Measure what a reduction costs, now that all ranks are here."""
        transport, on_device = self._transport, self._device.type == "cuda"
        samples: list[tuple[int, float]] = []
        for nbytes in PROBED_BYTES_ON_DEVICE if on_device else PROBED_BYTES:
            flat = transport.allocate(nbytes // 4, torch.float32, self._device)
            for probe in range(PROBES):
                if on_device:
                    torch.cuda.synchronize(self._device)
                started = time.perf_counter()
                self._wait(transport.all_reduce(flat), "a probe of the transport")
                if on_device:
                    torch.cuda.synchronize(self._device)
                if probe:  # the first one warms up
                    samples.append((nbytes, time.perf_counter() - started))
        return fit_cost(samples, inline=transport.inline)

    def _wait(self, work: Work, what: str) -> None:
        finish(work, what=what, watch=self._transport.watch, timeout_s=self._settings.timeout_s)


def _whole_order(layout: Layout, ready_order: Sequence[int]) -> list[int]:
    seen = set(ready_order)
    return [*ready_order, *(index for index in layout.order if index not in seen)]


class ReadyClock:
    """When each gradient of one backward became ready. On a GPU by its own clock: the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: dict[int, float | torch.cuda.Event] = {}
        self._begun: float | torch.cuda.Event = 0.0
        self._ended: float | torch.cuda.Event = 0.0

    def begin(self) -> None:
        self._marks.clear()
        self._begun = self._now()

    def note(self, param: int) -> None:
        self._marks[param] = self._now()

    def end(self) -> None:
        self._ended = self._now()

    def curve(self, layout: Layout, order: Sequence[int]) -> ReadyCurve:
        ready_s = {param: self._since_begun(mark) for param, mark in self._marks.items()}
        return ReadyCurve.of(layout.params, order, ready_s, self._since_begun(self._ended))

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_begun(self, mark: "float | torch.cuda.Event") -> float:
        if isinstance(mark, float):
            assert isinstance(self._begun, float)
            return mark - self._begun
        assert isinstance(self._begun, torch.cuda.Event)
        mark.synchronize()
        return max(0.0, float(self._begun.elapsed_time(mark)) / 1e3)
