"""Which gradients share a bucket: learned from the first backwards, and agreed by all ranks.

    reduction 1      the order in which gradients become ready; buckets are laid out in it
    reduction 3      when each becomes ready, and what a reduction costs here; buckets are cut so that the last one ends
    earliest

If the computing thread does the reductions, times matter little and the plan is made after reduction 1. Rank 0
decides, and all switch to the new layout at the next step. With torch's size arguments only the order is learned.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from paceline.bucket_plan import Cost, Plan, ReadyCurve, decode_groups, encode_groups, fit_cost, plan_boundaries
from paceline.collectives.group import Group
from paceline.collectives.protocols import Op, ScatteringTransport, Transport, Work
from paceline.layout import MIB, Layout, lay_groups, plan_layout
from paceline.reducer.buckets import BucketSet
from paceline.reducer.settings import ReducerSettings

logger = logging.getLogger("paceline")

PLAN_AT = 3  # the first backwards are slower, because memory and kernels are new
STOP_AT = 16  # learning ends here even if it is incomplete
PROBED_BYTES = (MIB // 4, 4 * MIB)
PROBED_BYTES_ON_DEVICE = (2 * MIB, 32 * MIB)
PROBES = 4
# No reduction is faster than the device's memory. Small probes do not show that limit, and without it one
# bucket would look as good as several (measured on an H200, on one rank: 311 MiB take 0.24 ms, 32 MiB as long as 2).
LEAST_S_PER_BYTE_ON_DEVICE = 0.7e-12


class Planning:
    """Plans the buckets of one replica."""

    def __init__(self, settings: ReducerSettings, group: Group, device: torch.device) -> None:
        self._settings = settings
        self._group = group
        self._device = device
        self._clock = ReadyClock(device)
        self._plans = settings.plans_buckets
        self._plan_at, self._stop_at = PLAN_AT, STOP_AT
        self._number = 0  # of the last reduction
        self.order_learned = False
        self.plan: Plan | None = None
        self.measures = False  # the times of the current backward are needed
        self.over = settings.keeps_layout  # there is nothing more to learn

    @property
    def _transport(self) -> Transport:
        return self._group.transport

    def begin(self, number: int, *, multi_step: bool) -> None:
        """Reduction `number` begins. Communication hooks (`multi_step`) may keep state by bucket, so these are not cut
        again."""
        self._number = number
        wanted = self._plans and not (self._group.single or self.learning_over or multi_step) and self.plan is None
        self.measures = wanted and (self._transport.traits(self._device).progress_on_caller or number >= self._plan_at)
        if self.measures:
            self._clock.begin()

    def begin_anew(self, layout: Layout, number: int) -> None:
        """Forget the plan: after reduction `number` gradients have another type or size, and become ready at other
        times."""
        self._device = layout.params[0].device
        self._clock = ReadyClock(self._device)
        self._plans = self._settings.plans_buckets
        self._plan_at, self._stop_at = number + PLAN_AT, number + STOP_AT
        self.plan = None
        self.over = False

    @property
    def learning_over(self) -> bool:
        """Whether there is nothing more to be learned, so that no rank has to wait for another one's times.

        Replicas that share a backward with others learn nothing: ranks may come to them in different orders, and what
        is learned takes collectives of its own.
        """
        return self.over or self._number >= self._stop_at

    def note_ready(self, param: int) -> None:
        self._clock.note(param)

    def note_end(self) -> None:
        self._clock.end()

    def after_reduction(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        """All ranks call it after a reduction in which rank 0 saw gradients become ready."""
        if self._number >= self._stop_at and not self.order_learned:
            return
        if self.measures:
            self._plan(buckets, ready_order)
        elif not self.order_learned:
            self._learn_order(buckets, ready_order)
        self.measures = False
        self.over = self.order_learned and not (self._plans and not self._group.single and self.plan is None)

    def _learn_order(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        order = torch.tensor(_whole_order(buckets.layout, ready_order), dtype=torch.int64, device="cpu")
        self._group.wait(self._transport.broadcast(order, 0), "the order of gradients")
        buckets.plan(plan_layout(buckets.layout.params, order.tolist(), self._settings.caps))
        self.order_learned = True

    def _plan(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        memory = self._probe_memory()
        if memory is None:
            self._plans = False
            if not self.order_learned:
                self._learn_order(buckets, ready_order)
            return
        params = buckets.layout.params
        curve = self._clock.curve(buckets.layout, _whole_order(buckets.layout, ready_order))
        cost = self._probe(memory, scatters=bool(buckets.sharding.shards))
        agreed = torch.zeros(len(params), dtype=torch.int64, device="cpu")
        if self._transport.rank == 0:
            agreed = torch.tensor(encode_groups(plan_boundaries(curve, cost).groups), dtype=torch.int64, device="cpu")
        self._group.wait(self._transport.broadcast(agreed, 0), "the bucket plan")
        groups = decode_groups(agreed.tolist(), len(params))
        self.plan = Plan.of(groups, curve, cost)
        buckets.plan(lay_groups(params, groups))
        self.order_learned = True

    def _probe_memory(self) -> torch.Tensor | None:
        """The memory for probes. None on all ranks if one of them cannot allocate it, because the others would wait."""
        nbytes = self._probed_bytes[-1]
        memory: torch.Tensor | None = None
        try:
            memory = self._transport.allocate(nbytes // 4, torch.float32, self._device)
        except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
            logger.warning(
                "rank %d could not allocate %s bytes to measure what a reduction costs, so buckets keep torch's sizes "
                "on all ranks: %s",
                self._transport.rank,
                f"{nbytes:,}",
                error,
            )
        able = torch.tensor([int(memory is not None)], dtype=torch.int32, device="cpu")
        self._group.wait(self._transport.all_reduce(able, Op.MIN), "whether all ranks can measure the transport")
        return memory if able.item() else None

    def _probe(self, memory: torch.Tensor, *, scatters: bool) -> Cost:
        """Measure the cost of a reduction while all ranks are in this call. `scatters`: each keeps its shard of it."""
        transport, on_device = self._transport, self._device.type == "cuda"
        samples: list[tuple[int, float]] = []
        for nbytes in self._probed_bytes:
            flat = memory[: nbytes // 4]
            for probe in range(PROBES):
                if on_device:
                    torch.cuda.synchronize(self._device)
                started = time.perf_counter()
                self._group.wait(self._start_probe(flat, scatters), "a probe of the transport")
                if on_device:
                    torch.cuda.synchronize(self._device)
                if probe:  # the first one warms up
                    samples.append((nbytes, time.perf_counter() - started))
        cost = fit_cost(samples, progress_on_caller=transport.traits(self._device).progress_on_caller)
        if on_device:
            cost = replace(cost, beta_s_per_byte=max(cost.beta_s_per_byte, LEAST_S_PER_BYTE_ON_DEVICE))
        return cost

    def _start_probe(self, flat: torch.Tensor, scatters: bool) -> Work:
        if not (scatters and self._transport.traits(self._device).reduce_scatter):
            return self._transport.all_reduce(flat)
        each = flat.numel() // self._group.size
        transport = cast(ScatteringTransport, self._transport)
        return transport.reduce_scatter_tensor(flat.new_empty(each), flat[: each * self._group.size])

    @property
    def _probed_bytes(self) -> tuple[int, ...]:
        return PROBED_BYTES_ON_DEVICE if self._device.type == "cuda" else PROBED_BYTES


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
