"""One parameter's place among the gradients."""

import math
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

import torch

from paceline.layout import ParamMeta
from paceline.reducer.autograd import raw_stream

if TYPE_CHECKING:
    from paceline.reducer.bucket import Bucket


class GradSlot:
    """One parameter's place in its bucket, and what of the current step is in it."""

    __slots__ = (
        "address",
        "asleep",
        "bucket",
        "dirty",
        "fired",
        "flushes",
        "held",
        "hooks",
        "index",
        "kept",
        "late",
        "meta",
        "nbytes",
        "offset",
        "param",
        "used",
        "view",
    )

    def __init__(self, index: int, meta: ParamMeta, param: torch.Tensor) -> None:
        self.index = index
        self.meta = meta
        self.nbytes = meta.nbytes
        self.param = param
        # Where the gradient lives: set by the bucket, again after every re-layout.
        self.bucket: Bucket
        self.view = torch.empty(0, device="cpu")
        self.offset = 0
        self.address = 0
        self.flushes = False  # on a host: those that wait to be copied fill the cache when this one has come
        self.hooks: Sized = ()  # on the parameter, also those of the user
        self.asleep = False  # another replica that shares the parameter reduces it
        # What of the current step is known.
        self.fired = False  # autograd has delivered a gradient in this backward
        self.held = False  # the bucket holds gradients of this step and `param.grad` is None
        self.used = False  # took part in some backward since the last reduction
        self.dirty = False  # has gradients that were not reduced
        self.late = False  # a nested backward delivered more after the bucket had left
        self.kept: torch.Tensor | None = None  # the gradient to give back if no rank used the parameter

    def only_counts(self) -> bool:
        """Count the bucket down by a gradient that has just come, if nothing else follows from it.

        Of most gradients nothing does, so this is what a hook costs. Returns False, and nothing is done, for those that
        complete or flush their bucket, come a second time or on another stream, or have hooks of the user's.
        """
        bucket = self.bucket
        if bucket.missing <= 1 or self.fired or self.flushes or self.asleep or len(self.hooks) != 1:
            return False
        if not (bucket.on_host or raw_stream(bucket.device_index) == bucket.stream):
            return False
        self.fired = self.used = self.dirty = True
        bucket.arrived.append(self)
        bucket.missing -= 1
        return True

    def attached(self) -> bool:
        """Whether `param.grad` is the view into the bucket, and no one gave that view other memory."""
        return self.param.grad is self.view and not self.meta.sparse and self.view.data_ptr() == self.address

    def leave_bucket(self) -> None:
        """Keep no reference to the bucket's memory, so that it can be freed before the next one is allocated."""
        del self.bucket
        self.view = torch.empty(0, device="cpu")

    def clear(self) -> None:
        self.used = self.dirty = self.fired = self.held = self.late = False
        self.kept = None

    def clear_backward(self) -> None:
        """The gradients of this backward are elsewhere now, but the step goes on."""
        self.fired = self.held = self.late = False
        self.kept = None


def is_something(grad: torch.Tensor | None) -> bool:
    """Whether there is a gradient other than the zeros of `zero_grad(set_to_none=False)`."""
    return grad is not None and bool(grad.any() if grad.layout == torch.strided else grad._nnz())


def first_with_something(slots: Sequence[GradSlot]) -> GradSlot | None:
    """The first slot whose gradient is something. A device is waited for once, and not once for every parameter."""
    found: dict[int, GradSlot] = {}
    asked: dict[torch.device, list[tuple[GradSlot, torch.Tensor]]] = {}
    for slot in slots:
        grad = slot.param.grad
        if grad is None or not grad.numel():
            continue
        if grad.layout is torch.strided:
            asked.setdefault(grad.device, []).append((slot, grad))
        elif is_something(grad):
            found[slot.index] = slot
    for there in asked.values():
        largest = torch._foreach_norm([grad for _, grad in there], math.inf)
        there_found = torch.stack(largest).ne(0).tolist()  # also what is not a number
        found.update((slot.index, slot) for (slot, _), is_one in zip(there, there_found, strict=True) if is_one)
    return found[min(found)] if found else None
