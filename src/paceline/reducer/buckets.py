"""All buckets of one replica under its current layout, and the move to the next one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from paceline.collectives.api import Transport
from paceline.errors import BucketsTooLarge
from paceline.layout import ALIGN_BYTES, BucketCaps, Layout, plan_layout
from paceline.reducer.bucket import Bucket, BucketState
from paceline.reducer.lanes import Lanes
from paceline.reducer.report import all_used
from paceline.reducer.slot import GradSlot, first_with_something


class BucketSet:
    """The gradients of one replica: a slot per parameter, in buckets that are launched in index order.

    The memory is allocated when it is first needed. A world of one never needs it: see `Reducer.is_alone`.
    """

    def __init__(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        pairs = zip(layout.params, params, strict=True)
        self.slots = [GradSlot(index, meta, param) for index, (meta, param) in enumerate(pairs)]
        self.slot_of = {id(slot.param): slot for slot in self.slots}
        self.layout = layout
        self._first = layout  # what all ranks begin with, before they have learned anything from each other
        self.buckets: list[Bucket] = []
        self.next = 0  # the bucket whose turn it is
        self.seen_complete = 0  # how many are known to have completed
        self.all_used = all_used(len(self.slots))  # what the report says if every parameter took part
        self._planned: Layout | None = None

    def lay(self, transport: Transport) -> None:
        """Allocate the buckets of the layout and point every slot into them."""
        memory = _allocate(self.layout, transport)
        self.buckets = [
            Bucket(spec, [self.slots[place.param] for place in spec.slots], flat)
            for spec, flat in zip(self.layout.buckets, memory, strict=True)
        ]

    @property
    def laid(self) -> bool:
        return bool(self.buckets)

    @property
    def last(self) -> int:
        return len(self.buckets) - 1

    def rearm(self) -> None:
        """Make ready for the next reduction, after a whole one or one that was broken off."""
        for slot in self.slots:
            slot.clear()
        for bucket in self.buckets:
            bucket.rearm()
        self.next = self.seen_complete = 0

    def keep(self, scale: float, *, held: bool) -> None:
        """A backward that was not reduced is over: keep what it has brought. See `Bucket.keep`."""
        for bucket in self.buckets:
            bucket.keep(scale, held=held)

    def forget_arrived(self) -> None:
        """A backward has failed: what it has brought stays where autograd put it."""
        for bucket in self.buckets:
            bucket.arrived.clear()

    def claim_by_hand(self) -> None:
        """What was put in the place of a gradient is to be reduced like one that came through a backward."""
        for slot in self._foreign():
            slot.used = True

    def has_foreign(self) -> bool:
        """Whether somebody has put something in the place of a gradient that was reduced."""
        return self.laid and not all(slot.meta.sparse for slot in self._foreign())  # a sparse one is never a view

    def _foreign(self) -> Iterator[GradSlot]:
        return (s for s in self.slots if not (s.asleep or s.param.grad is None or s.attached()))

    def fill_up(self, scale: float, *, skips_unused: bool) -> list[Bucket]:
        """Complete the buckets that lack gradients, now that backward is over. Returns these."""
        lacking = [bucket for bucket in self.buckets if bucket.state is BucketState.FILLING]
        for bucket in lacking:
            bucket.skipped = skips_unused and not any(slot.used for slot in bucket.slots)
            for slot in bucket.slots:
                if slot.asleep:
                    bucket.zero(slot)
                elif not slot.fired:
                    bucket.contribute_nothing_new(slot, scale)
            bucket.move(BucketState.FULL)
        return lacking

    def fold(self, lanes: Lanes, scale: float) -> None:
        """All buckets are full, with the gradients of one lane: add them to the sums and begin to fill again."""
        for bucket in self.buckets:
            bucket.complete(scale)
            lanes.fold(bucket.spec.index, bucket.flat)
        self.begin_lane()

    def begin_lane(self) -> None:
        """Have empty buckets for the next lane. Which parameters took part in those before it is not forgotten."""
        for bucket in self.buckets:
            bucket.rearm()
        for slot in self.slots:
            slot.clear_backward()
        self.next = self.seen_complete = 0

    def lend_all(self) -> None:
        """Contribute zeros, and keep what gradients there are."""
        for slot in self.slots:
            slot.bucket.zero(slot) if slot.asleep else slot.bucket.lend(slot)
            slot.fired = True
        for bucket in self.buckets:
            bucket.move(BucketState.FULL)

    def asleep(self) -> int:
        """A digest of the parameters that another replica reduces; 0 if there are none."""
        found = tuple(slot.index for slot in self.slots if slot.asleep)
        return hash(found) if found else 0

    def unused(self) -> int:
        return sum(not (slot.used or slot.asleep) for slot in self.slots)

    def leave_flying_memory(self, transport: Transport) -> bool:
        """Give up memory that a transport may still write to: whoever waited for it was interrupted. Whether there was.

        Its work is not asked whether it is done: a work of several collectives would go on with the next one.
        """
        if any(bucket.state is BucketState.FLYING and bucket.flight is not None for bucket in self.buckets):
            self.lay(transport)
            return True
        return False

    def is_empty(self) -> bool:
        return not any(slot.held or slot.param.grad is not None for slot in self.slots)

    def is_thrown_away(self) -> bool:
        """Whether zero_grad() has thrown away all that micros of this step had left, or made it zeros."""
        left = [slot for slot in self.slots if slot.held or slot.param.grad is not None]
        if any(slot.held or slot.bucket.is_untouched() for slot in left):
            return False
        return first_with_something(left) is None  # somebody has written to them, or they are not ours

    def forget_thrown_away(self) -> None:
        """Forget what earlier micros did to parameters whose gradients zero_grad() has thrown away since."""
        for slot in self.slots:
            if slot.param.grad is None and not slot.held:
                slot.used = slot.dirty = False

    def note_unreduced(self) -> None:
        """Note what a backward has left, where parameters are not hooked."""
        for slot in self.slots:
            slot.dirty = slot.param.grad is not None

    def hold_all(self) -> bool:
        """Hold every gradient that is visible. False, and nothing is done, if there is none, or one not of ours."""
        slots = [slot for slot in self.slots if slot.param.grad is not None]
        if not slots or not all(slot.attached() or slot.meta.sparse for slot in slots):
            return False
        for slot in slots:
            slot.bucket.take(slot)
        return True

    def show_all(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                bucket.show(slot)
            bucket.note_shown()

    def first_with_gradient(self) -> str | None:
        found = first_with_something(self.slots)
        return None if found is None else found.meta.name

    def drop_late(self) -> None:
        for slot in self.slots:
            if slot.late:
                slot.param.grad = None

    def drop_gradients(self) -> None:
        for slot in self.slots:
            if not slot.asleep:
                slot.param.grad = None
            slot.kept = None

    def any_in_flight(self) -> bool:
        """Whether a collective is under way. Asking lets a work of several collectives go on with the next one."""
        return any(b.state is BucketState.FLYING and b.flight and not b.flight.work.done() for b in self.buckets)

    def newly_completed(self) -> int | None:
        """The next bucket in order that has completed and was not told of yet."""
        index = self.seen_complete
        if index >= self.next:
            return None
        flight = self.buckets[index].flight
        if flight is not None and not flight.work.done():
            return None
        self.seen_complete += 1
        return index

    def follow_parameters(self, caps: BucketCaps, transport: Transport) -> bool:
        """Lay out anew if the module was converted after wrapping, as by `module.double()`. Whether it was."""
        if all(slot.param.dtype is slot.meta.dtype for slot in self.slots):
            return False
        for slot in self.slots:
            slot.meta = replace(
                slot.meta, dtype=slot.param.dtype, device=slot.param.device, stride=tuple(slot.param.stride())
            )
        self._planned = None
        metas = [slot.meta for slot in self.slots]
        self.layout = plan_layout(metas, self.layout.order, caps)
        self._first = plan_layout(metas, self._first.order, caps)
        if self.laid:
            self.lay(transport)
        return True

    def plan(self, layout: Layout) -> None:
        """Note a layout to move to; taken up by `move_to_plan`."""
        self._planned = layout if layout != self.layout else None

    def move_to_plan(self, transport: Transport) -> bool:
        """Take up the planned layout. Gradients that are views move along; held ones keep the old layout in place."""
        if self._planned is None or any(slot.held for slot in self.slots):
            return False
        self.layout, self._planned = self._planned, None
        if self.laid:
            self._move(transport)
        return True

    def move_memory(self, transport: Transport) -> None:
        """Take memory of another transport, and forget what was learned with the one before: ranks that were stopped in
        different places may have taken up different layouts."""
        self._planned, self.layout = None, self._first
        if self.laid:
            self._move(transport)

    def _move(self, transport: Transport) -> None:
        """Lay the buckets anew. Gradients that are views move along."""
        moved = [(slot, slot.view) for slot in self.slots if slot.attached()]
        if not moved:  # then old and new buckets need not exist together
            self.buckets.clear()
            for slot in self.slots:
                slot.leave_bucket()
        self.lay(transport)
        for slot, old_view in moved:
            slot.view.copy_(old_view)
            slot.param.grad = slot.view


def _allocate(layout: Layout, transport: Transport) -> list[torch.Tensor | None]:
    """The memory of every bucket, cut from one piece per device. None for sparse ones, whose gradients bring theirs."""
    ends: dict[torch.device, int] = {}
    places: list[int] = []
    for spec in layout.buckets:
        start = ends.get(spec.device, 0)
        places.append(start)
        if not spec.sparse:
            ends[spec.device] = start + -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    pieces = {device: _piece(nbytes, device, layout, transport) for device, nbytes in ends.items()}
    return [
        None if spec.sparse else pieces[spec.device][start : start + spec.nbytes].view(spec.dtype)
        for spec, start in zip(layout.buckets, places, strict=True)
    ]


def _piece(nbytes: int, device: torch.device, layout: Layout, transport: Transport) -> torch.Tensor:
    try:
        return transport.allocate(nbytes, torch.uint8, device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise BucketsTooLarge(
            f"rank {transport.rank} could not allocate {nbytes:,} bytes on {device} for the gradients of "
            f"{len(layout.params)} parameters in {len(layout.buckets)} buckets: {error}; use a smaller model, freeze "
            f"parameters, or free memory before wrapping"
        ) from error
