"""Gradients that are there beside those of the backward that runs: left by microbatches that were not reduced, put
there by hand, or lent for a reduction and to be given back as they were."""

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
    accumulates, or one that a hook of the user's has yet to see."""
    if backward.alone:  # that is all: see Reducer.is_alone
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
    if held:  # until the next backward, so that zero_grad() can throw them away
        show_all(reducer.bucket_set)


def end_alone(reducer: "Reducer", backward: "Backward") -> None:
    """A backward is over with nobody to reduce with: autograd has made the mean already."""
    reducer.trace.stamp(Moment.BACKWARD_END, reducer.reductions_begun)
    if backward.syncs:
        reducer.wait_for_buffer_hooks()
        reducer.step_state.reduced()
        reducer.reset()
    else:
        for slot in reducer.bucket_set.slots:  # which are not hooked
            slot.dirty = slot.grad is not None


def _holds(reducer: "Reducer") -> bool:
    """Whether autograd must not add to unreduced gradients, because they are weighted or of another type."""
    return reducer.weighting.current is not None or reducer.settings.hold


def keep(bucket: Bucket, scale: float, *, held: bool) -> None:
    """Move what has arrived into the bucket's memory: `held`, times `scale`, or visible as `param.grad`."""
    if bucket.in_turn:  # its memory is another bucket's too: what was not reduced stays where autograd put it
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
    """Contribute zeros and keep the gradient that is there, to be given back untouched."""
    grad = slot.grad
    slot.kept = grad.clone() if grad is not None and slot.attached() else grad
    slot.param.grad = None
    slot.bucket.zero(slot)


def claim_by_hand(buckets: BucketSet) -> None:
    """What was put in the place of a gradient is to be reduced like one that came through a backward."""
    for slot in _foreign(buckets):
        slot.used = True


def has_foreign(buckets: BucketSet) -> bool:
    """Whether somebody has put something in the place of a gradient that was reduced."""
    return buckets.allocated and not all(slot.meta.sparse for slot in _foreign(buckets))  # a sparse one is never a view


def _foreign(buckets: BucketSet) -> Iterator[GradSlot]:
    return (s for s in buckets.slots if not (s.owned_elsewhere or s.grad is None or s.attached()))


def lend_all(buckets: BucketSet) -> None:
    """Contribute zeros, and keep what gradients there are."""
    for slot in buckets.slots:
        slot.bucket.zero(slot) if slot.owned_elsewhere else lend(slot)
        slot.fired = True
    for bucket in buckets.buckets:
        bucket.move(BucketState.FULL)


def is_empty(buckets: BucketSet) -> bool:
    return not any(slot.held or slot.grad is not None for slot in buckets.slots)


def is_thrown_away(buckets: BucketSet) -> bool:
    """Whether zero_grad() has thrown away all that microbatches of this step had left, or made it zeros."""
    left = [slot for slot in buckets.slots if slot.held or slot.grad is not None]
    if any(slot.held or slot.bucket.flat._version == slot.bucket.shown_version for slot in left):
        return False
    return first_nonzero(left) is None  # somebody has written to them, or they are not ours


def forget_thrown_away(buckets: BucketSet) -> None:
    """Forget what earlier microbatches did to parameters whose gradients zero_grad() has thrown away since."""
    for slot in buckets.slots:
        if slot.grad is None and not slot.held:
            slot.used = slot.dirty = False


def drop_all(buckets: BucketSet) -> None:
    """Have no gradients at all."""
    for slot in buckets.slots:
        if not slot.owned_elsewhere:
            slot.param.grad = None
        if slot.shard is not None:
            slot.shard.drop()
        slot.kept = None


def hold_all(buckets: BucketSet) -> bool:
    """Hold every gradient that is visible. False, and nothing is done, if there is none, or one not of ours."""
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
        bucket.shown_version = bucket.flat._version  # whoever writes to them from now on is noticed


def first_with_gradient(buckets: BucketSet) -> str | None:
    found = first_nonzero(buckets.slots)
    return None if found is None else found.meta.name


def is_nonzero(grad: torch.Tensor | None) -> bool:
    """Whether there is a gradient other than the zeros of `zero_grad(set_to_none=False)`."""
    return grad is not None and bool(grad.any() if grad.layout == torch.strided else grad._nnz())


def first_nonzero(slots: Sequence[GradSlot]) -> GradSlot | None:
    """The first slot whose gradient is something. A device is waited for once, and not once for every parameter."""
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
        there_found = torch.stack(largest).ne(0).tolist()  # also what is not a number
        found.update((slot.index, slot) for (slot, _), is_one in zip(there, there_found, strict=True) if is_one)
    return found[min(found)] if found else None
