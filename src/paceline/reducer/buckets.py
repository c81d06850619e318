"""All buckets of one replica under its current layout, and the move to the next one."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.collectives.api import Transport
from paceline.layout import BucketCaps, Layout, plan_layout
from paceline.reducer.bucket import Bucket, BucketState, GradSlot, is_something


class BucketSet:
    """The gradients of one replica: a slot per parameter, in buckets that are launched in index order."""

    def __init__(self, params: Sequence[torch.Tensor], layout: Layout, transport: Transport) -> None:
        pairs = zip(layout.params, params, strict=True)
        self.slots = [GradSlot(index, meta, param) for index, (meta, param) in enumerate(pairs)]
        self.slot_of = {id(slot.param): slot for slot in self.slots}
        self.next = 0  # the bucket whose turn it is
        self._seen_complete = 0
        self._planned: Layout | None = None
        self.lay(layout, transport)

    def lay(self, layout: Layout, transport: Transport) -> None:
        """Allocate the buckets of `layout` and point every slot into them."""
        self.layout = layout
        self.buckets = [
            Bucket(spec, [self.slots[place.param] for place in spec.slots], transport) for spec in layout.buckets
        ]

    @property
    def last(self) -> int:
        return len(self.buckets) - 1

    def rearm(self) -> None:
        """Make ready for the next reduction, after a whole one or one that was broken off."""
        for slot in self.slots:
            slot.clear()
        for bucket in self.buckets:
            bucket.rearm()
        self.next = self._seen_complete = 0

    def leave_flying_memory(self, transport: Transport) -> None:
        """Give up memory that a transport may still write to: whoever waited for it was interrupted."""
        if self.any_in_flight():
            self.lay(self.layout, transport)

    def forget_thrown_away(self) -> None:
        """Forget what earlier micros did to parameters whose gradients zero_grad() has thrown away since."""
        for slot in self.slots:
            if slot.param.grad is None and not slot.held:
                slot.used = slot.dirty = False

    def hold_all(self) -> bool:
        """Hold every gradient that is visible. False, and nothing is done, if there is none, or one not of ours."""
        slots = [slot for slot in self.slots if slot.param.grad is not None]
        if not slots or not all(slot.attached() or slot.meta.sparse for slot in slots):
            return False
        for slot in slots:
            slot.bucket.take(slot)
        return True

    def show_all(self) -> None:
        for slot in self.slots:
            slot.bucket.show(slot)

    def first_with_gradient(self) -> str | None:
        return next((slot.meta.name for slot in self.slots if is_something(slot.param.grad)), None)

    def drop_gradients(self) -> None:
        for slot in self.slots:
            slot.param.grad = None

    def any_in_flight(self) -> bool:
        return any(b.state is BucketState.FLYING and b.flight and not b.flight.work.done() for b in self.buckets)

    def newly_completed(self) -> int | None:
        """The next bucket in order that has completed and was not told of yet."""
        index = self._seen_complete
        if index >= self.next:
            return None
        flight = self.buckets[index].flight
        if flight is not None and not flight.work.done():
            return None
        self._seen_complete += 1
        return index

    def follow_parameters(self, caps: BucketCaps, transport: Transport) -> None:
        """Lay out anew if the module was converted after wrapping, as by `module.double()`."""
        if all(slot.param.dtype == slot.meta.dtype for slot in self.slots):
            return
        for slot in self.slots:
            slot.meta = replace(
                slot.meta, dtype=slot.param.dtype, device=slot.param.device, stride=tuple(slot.param.stride())
            )
        self._planned = None
        self.lay(plan_layout([slot.meta for slot in self.slots], self.layout.order, caps), transport)

    def plan(self, order: Sequence[int], caps: BucketCaps) -> None:
        """Plan buckets for gradients that become ready in `order`; taken up by `move_to_plan`."""
        planned = plan_layout(self.layout.params, order, caps)
        self._planned = planned if planned != self.layout else None

    def move_to_plan(self, transport: Transport) -> bool:
        """Take up the planned layout. Gradients that are views move along; held ones keep the old layout in place."""
        if self._planned is None or any(slot.held for slot in self.slots):
            return False
        moved = [(slot, slot.view) for slot in self.slots if slot.attached()]
        if not moved:  # then old and new buckets need not exist together
            self.buckets.clear()
            for slot in self.slots:
                slot.leave_bucket()
        self.lay(self._planned, transport)
        for slot, old_view in moved:
            slot.view.copy_(old_view)
            slot.param.grad = slot.view
        self._planned = None
        return True
