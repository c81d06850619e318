"""Gradients beside those of the current backward: left by microbatches that were not reduced, assigned by the user, or
set aside for one reduction and restored afterwards."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.reducer.bucket import Bucket, BucketState, GradSlot
from paceline.reducer.buckets import BucketSet
from paceline.trace import Moment

if TYPE_CHECKING:
    from paceline.reducer.autograd import Backward
    from paceline.reducer.reducer import Reducer


def add_without_counting(reducer: "Reducer", slot: GradSlot, backward: "Backward", *, user_hooks_pending: bool) -> None:
    """Take a gradient that does not count its bucket down: a second one in this backward, one of a backward that only
    accumulates, or one that a user hook has not seen yet."""
    if backward.alone:  # nothing else to do: see Reducer.is_alone
        if not slot.fired:
            slot.fired = True
            reducer.ready_order.append(slot.index)
        return
    bucket = slot.bucket
    if bucket.state in (BucketState.LAUNCHED, BucketState.REDUCED):
        slot.late = True  # stays in param.grad until the end; see the note in Bucket
        reducer.contribution.late += 1
        return
    scale = reducer.schedule.scale
    flush = bucket.arrive(slot, scale) or (not backward.syncs and len(bucket.arrived) == len(bucket.slots))
    if flush and not user_hooks_pending:
        keep(bucket, scale, held=backward.syncs or _holds(reducer))


def end_unreduced(reducer: "Reducer") -> None:
    """A backward that only adds to the gradients is over."""
    held = _holds(reducer)
    for bucket in reducer.bucket_set.buckets:
        keep(bucket, reducer.schedule.scale, held=held)
    for call in reducer.callbacks.finished:
        call()
    if held:  # visible until the next backward, so that zero_grad() can drop them
        show_all(reducer.bucket_set)


def end_alone(reducer: "Reducer", backward: "Backward") -> None:
    """A backward without other ranks is over: autograd's gradients already are the mean."""
    reducer.trace.stamp(Moment.BACKWARD_END, reducer.reductions_begun)
    if backward.syncs:
        reducer.wait_for_buffer_hooks()
        reducer.step_state.reduced()
        reducer.reset()
    else:
        for slot in reducer.bucket_set.slots:  # which are not hooked
            slot.dirty = slot.grad is not None


def _holds(reducer: "Reducer") -> bool:
    """Whether autograd must not add to unreduced gradients, because they are weighted or have another type."""
    return reducer.weighting.current is not None or reducer.settings.hold


def keep(bucket: Bucket, scale: float, *, held: bool) -> None:
    """Move what has arrived into the bucket's memory: `held`, times `scale`, or visible as `param.grad`."""
    if bucket.in_turn:  # other buckets use its memory: unreduced gradients stay where autograd put them
        if held:
            raise UsageError(
                'weight() around several microbatches of a step cannot be combined with placement="zero2", which has '
                'no memory for gradients that are not reduced yet; use placement="zero1"'
            )
        bucket.arrived.clear()
    elif held:
        bucket.collect(scale)
    else:
        accumulate(bucket)


def accumulate(bucket: Bucket) -> None:
    """Keep what has arrived in the bucket's memory, unreduced and visible as `param.grad`: there is no second copy of
    the gradients."""
    slots = [slot for slot in bucket.arrived if slot.grad is not None and not slot.meta.sparse]
    bucket.arrived = [slot for slot in slots if not slot.attached()]
    bucket.collect(1.0)
    for slot in slots:
        show(slot)
    bucket.arrived.clear()


def show(slot: GradSlot) -> None:
    """Make a held gradient visible as `param.grad` again, unreduced."""
    if slot.held and not slot.meta.sparse:
        slot.param.grad = slot.view
        slot.held = False


def lend(slot: GradSlot) -> None:
    """Contribute zeros and keep the existing gradient, to be restored unchanged."""
    grad = slot.grad
    slot.kept = grad.clone() if grad is not None and slot.attached() else grad
    slot.param.grad = None
    slot.bucket.zero(slot)


def claim_by_hand(buckets: BucketSet) -> None:
    """Reduce assigned gradients like those of a backward."""
    for slot in _foreign(buckets):
        slot.used = True


def has_foreign(buckets: BucketSet) -> bool:
    """Whether a reduced gradient was replaced by another tensor."""
    return buckets.allocated and not all(slot.meta.sparse for slot in _foreign(buckets))  # a sparse one is never a view


def _foreign(buckets: BucketSet) -> Iterator[GradSlot]:
    return (s for s in buckets.slots if not (s.owned_elsewhere or s.grad is None or s.attached()))


def lend_all(buckets: BucketSet) -> None:
    """Contribute zeros, and keep existing gradients."""
    for slot in buckets.slots:
        slot.bucket.zero(slot) if slot.owned_elsewhere else lend(slot)
        slot.fired = True
    for bucket in buckets.buckets:
        bucket.move(BucketState.FULL)


def is_empty(buckets: BucketSet) -> bool:
    return not any(slot.held or slot.grad is not None for slot in buckets.slots)


def is_thrown_away(buckets: BucketSet) -> bool:
    """Whether zero_grad() has dropped or zeroed everything that microbatches of this step had left."""
    left = [slot for slot in buckets.slots if slot.held or slot.grad is not None]
    if any(slot.held or slot.bucket.flat._version == slot.bucket.shown_version for slot in left):
        return False
    return first_nonzero(left) is None  # somebody has written to them, or they are not ours


def forget_thrown_away(buckets: BucketSet) -> None:
    """Forget what earlier microbatches did to parameters whose gradients zero_grad() has dropped since."""
    for slot in buckets.slots:
        if slot.grad is None and not slot.held:
            slot.used = slot.dirty = False


def drop_all(buckets: BucketSet) -> None:
    """Drop all gradients."""
    for slot in buckets.slots:
        if not slot.owned_elsewhere:
            slot.param.grad = None
        if slot.shard is not None:
            slot.shard.drop()
        slot.kept = None


def hold_all(buckets: BucketSet) -> bool:
    """Hold every gradient that is visible. False, without any effect, if there is none, or one that is not the
    reducer's."""
    slots = [slot for slot in buckets.slots if slot.grad is not None]
    if not slots or not all(slot.attached() or slot.meta.sparse for slot in slots):
        return False
    for slot in slots:
        if slot.attached():
            slot.param.grad = None
            slot.held = True
    return True


def show_all(buckets: BucketSet) -> None:
    for bucket in buckets.buckets:
        for slot in bucket.slots:
            show(slot)
        bucket.shown_version = bucket.flat._version  # later writes to them are detected


def first_with_gradient(buckets: BucketSet) -> str | None:
    found = first_nonzero(buckets.slots)
    return None if found is None else found.meta.name


def is_nonzero(grad: torch.Tensor | None) -> bool:
    """Whether there is a gradient other than the zeros of `zero_grad(set_to_none=False)`."""
    return grad is not None and bool(grad.any() if grad.layout == torch.strided else grad._nnz())


def first_nonzero(slots: Sequence[GradSlot]) -> GradSlot | None:
    """The first slot with a nonzero gradient. Waits for a device once, not once per parameter."""
    found: dict[int, GradSlot] = {}
    asked: dict[torch.device, list[tuple[GradSlot, torch.Tensor]]] = {}
    for slot in slots:
        grad = slot.grad
        if grad is None or not grad.numel():
            continue
        if grad.layout is torch.strided:
            asked.setdefault(grad.device, []).append((slot, grad))
        elif is_nonzero(grad):
            found[slot.index] = slot
    for there in asked.values():
        largest = torch._foreach_norm([grad for _, grad in there], math.inf)
        there_found = torch.stack(largest).ne(0).tolist()  # NaN counts as nonzero
        found.update((slot.index, slot) for (slot, _), is_one in zip(there, there_found, strict=True) if is_one)
    return found[min(found)] if found else None
