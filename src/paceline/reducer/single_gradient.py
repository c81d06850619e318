"""One gradient on its way into its bucket: what cannot be copied together with others by one call."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.reducer.bucket import GradSlot


def move_in(slot: "GradSlot", grad: torch.Tensor, scale: float) -> None:
    """Have `grad`, times `scale`, in the bucket: in the slot's place, or added to what the bucket holds there."""
    if scale == 0.0:  # not a product: a rank without tokens may well have a gradient that is not finite
        if not slot.held:
            own_view(slot).zero_()
    elif slot.held:
        slot.view.add_(grad, alpha=scale)
    elif grad is not slot.view or slot.view.data_ptr() != slot.address:
        _fill(slot, grad, scale)
    elif scale != 1.0:
        slot.view.mul_(scale)


def own_view(slot: "GradSlot") -> torch.Tensor:
    """The view, made anew if someone wrote `param.grad.data = ...` and so gave it other memory."""
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
        grad = grad.clone()  # another look at the bucket's own memory, such as `param.grad.t()`
    if scale == 1.0:
        view.copy_(grad)
    elif grad.dtype is view.dtype:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)
