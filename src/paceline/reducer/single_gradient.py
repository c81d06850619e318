"""Moving one gradient into its bucket: which are copied while they are in the cache, and which cannot be copied
together with others by one call."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.reducer.bucket import GradSlot


# On a host gradients are copied while they are still in the cache: when this many bytes, or this many gradients, wait.
CACHED_BYTES = 64 * 1024
TOGETHER = 64


def choose_flushes(slots: "Sequence[GradSlot]") -> None:
    """Gradients that arrive in this order are copied while they are in the cache; in another order, earlier or
    later."""
    waiting = nbytes = 0
    for slot in slots:
        waiting, nbytes = waiting + 1, nbytes + slot.nbytes
        slot.flushes = waiting == TOGETHER or nbytes >= CACHED_BYTES
        if slot.flushes:
            waiting = nbytes = 0


def contribute_nothing_new(slot: "GradSlot", scale: float) -> None:
    """Complete a slot that got no gradient in this backward: with the gradient that was there before, else with
    zeros."""
    bucket, grad = slot.bucket, slot.param.grad
    if grad is not None:
        if not slot.used:
            slot.kept = grad.clone() if slot.attached() else grad
        bucket.arrived.append(slot)
        if not bucket.in_turn:
            bucket.collect(scale)
    elif not slot.held:
        bucket.zero(slot)


def move_in(slot: "GradSlot", grad: torch.Tensor, scale: float) -> None:
    """Put `grad`, times `scale`, into the bucket: in the slot's place, or added to what the bucket holds there."""
    if scale == 0.0:  # not a product: a rank without tokens may have a non-finite gradient
        if not slot.held:
            own_view(slot).zero_()
    elif slot.held:
        slot.view.add_(grad, alpha=scale)
    elif grad is not slot.view or slot.view.data_ptr() != slot.address:
        _fill(slot, grad, scale)
    elif scale != 1.0:
        slot.view.mul_(scale)


def own_view(slot: "GradSlot") -> torch.Tensor:
    """The view, created again if `param.grad.data = ...` gave it other memory."""
    if slot.view.data_ptr() != slot.address:
        slot.bucket.renew_view(slot)
    return slot.view


def _fill(slot: "GradSlot", grad: torch.Tensor, scale: float) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {slot.meta.name} was expected to have a dense gradient, got layout {grad.layout}; only "
            f"torch.nn.Embedding and EmbeddingBag with sparse=True are known to make sparse ones"
        )
    view = own_view(slot)
    if grad._is_view() and grad.untyped_storage().data_ptr() == slot.bucket.flat.untyped_storage().data_ptr():
        grad = grad.clone()  # another view of the bucket's own memory, such as `param.grad.t()`
    if scale == 1.0:
        view.copy_(grad)
    elif grad.dtype is view.dtype:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)
