"""The memory of one bucket, and the gradients that are views of it."""

from collections.abc import Sequence
from enum import Enum, auto

import torch

from paceline.collectives.reduction import Flight, GradBucket
from paceline.errors import IllegalMove
from paceline.layout import BucketSpec, ParamMeta


class BucketState(Enum):
    """The life of a bucket within one backward."""

    FILLING = auto()  # some gradients are missing
    FULL = auto()  # all gradients are in; waits for its turn
    FLYING = auto()  # the transport owns the memory
    LANDED = auto()  # reduced


_NEXT_STATES = {
    BucketState.FILLING: (BucketState.FULL,),
    BucketState.FULL: (BucketState.FLYING,),
    BucketState.FLYING: (BucketState.LANDED,),
    BucketState.LANDED: (BucketState.FILLING,),
}


class GradSlot:
    """One parameter's place in its bucket, and what of the current step is in it."""

    __slots__ = (
        "address",
        "asleep",
        "bucket",
        "dirty",
        "fired",
        "held",
        "index",
        "kept",
        "late",
        "meta",
        "offset",
        "param",
        "used",
        "view",
    )

    def __init__(self, index: int, meta: ParamMeta, param: torch.Tensor) -> None:
        self.index = index
        self.meta = meta
        self.param = param
        # Where the gradient lives: set by the bucket, again after every re-layout.
        self.bucket: Bucket
        self.view = torch.empty(0)
        self.offset = 0
        self.address = 0
        self.asleep = False  # another replica that shares the parameter reduces it
        # What of the current step is known.
        self.fired = False  # autograd has delivered a gradient in this backward
        self.held = False  # the bucket holds gradients of this step and `param.grad` is None
        self.used = False  # took part in some backward since the last reduction
        self.dirty = False  # has gradients that were not reduced
        self.late = False  # a nested backward delivered more after the bucket had left
        self.kept: torch.Tensor | None = None  # the gradient to give back if no rank used the parameter

    def attached(self) -> bool:
        """Whether `param.grad` is the view into the bucket, and no one gave that view other memory."""
        return self.param.grad is self.view and not self.meta.sparse and self.view.data_ptr() == self.address

    def leave_bucket(self) -> None:
        """Keep no reference to the bucket's memory, so that it can be freed before the next one is allocated."""
        del self.bucket
        self.view = torch.empty(0)

    def clear(self) -> None:
        self.fired = self.held = self.used = self.dirty = self.late = False
        self.kept = None


class Bucket:
    """One flat buffer of gradients that are reduced together."""

    def __init__(self, spec: BucketSpec, slots: Sequence[GradSlot], flat: torch.Tensor | None) -> None:
        """`flat` is the memory; None for a sparse gradient, which brings its own."""
        self.spec = spec
        self.slots = list(slots)
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.flight: Flight | None = None
        self.skipped = False  # left out of this reduction, because no rank used any of it
        self.streams: list[torch.cuda.Stream] = []  # that the gradients in it were made on
        self.flat = _no_rows(slots[0].meta) if flat is None else flat
        self._sparse = spec.sparse
        self._on_stream = spec.device.type == "cuda"
        for slot, place in zip(self.slots, spec.slots, strict=True):
            slot.bucket = self
            slot.offset = place.offset
            self.renew_view(slot)

    def renew_view(self, slot: GradSlot) -> None:
        """Point `slot` at its part of the buffer, shaped and strided like the parameter."""
        if self._sparse:
            slot.view = self.flat
            return
        if _dense(slot.meta):
            slot.view = self.flat.as_strided(
                slot.meta.shape, slot.meta.stride, self.flat.storage_offset() + slot.offset
            )
        else:
            slot.view = self.flat[slot.offset : slot.offset + slot.meta.numel].view(slot.meta.shape)
        slot.address = slot.view.data_ptr()

    def move(self, to: BucketState) -> None:
        """Enter state `to`; a move that is not in the table is an error of ours and is refused."""
        if to not in _NEXT_STATES[self.state]:
            raise IllegalMove(f"bucket {self.spec.index} cannot go from {self.state.name} to {to.name}")
        self.state = to

    def rearm(self) -> None:
        """Begin to fill again, from any state: also after a backward that failed half-way."""
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.flight = None
        self.skipped = False
        self.streams.clear()

    def grad_bucket(self, *, last: bool) -> GradBucket:
        views = [self.flat] if self._sparse else [slot.view for slot in self.slots]
        params = [slot.param for slot in self.slots]
        return GradBucket(self.spec.index, self.flat, views, params, last=last)

    def collect(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        """Move `grad`, which is `param.grad`, times `scale` into the bucket, which owns it until it hands it back.

        Note: the bucket owns its gradients while a backward runs
        ---------------------------------------------------------
        `param.grad` is None from here until `hand_back`. A nested backward (reentrant checkpointing, weights used
        twice) may deliver more for the same parameter, and autograd adds into whatever `param.grad` is: into memory
        that the transport may be reading at that moment, if it were still the view. With None in its place autograd
        makes a new tensor, which is added here, or, when the bucket has left already, in a second round at the end.
        """
        view = slot.view
        if slot.held or scale == 0.0 or self._sparse:
            self._collect_seldom(slot, grad, scale)
        elif grad is view and view.data_ptr() == slot.address:
            if scale != 1.0:
                view.mul_(scale)
        else:
            self._fill(slot, grad, scale)
        if self._on_stream:
            self._note_stream()
        slot.held = True
        slot.param.grad = None

    def _collect_seldom(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        if scale == 0.0:  # not a product: a rank without tokens may well have a gradient that is not finite
            if not slot.held:
                self.zero(slot)
        elif self._sparse:
            self._collect_sparse(slot, grad, scale)
        else:
            slot.view.add_(grad, alpha=scale)

    def _note_stream(self) -> None:
        stream = torch.cuda.current_stream(self.spec.device)
        if stream not in self.streams:
            self.streams.append(stream)

    def join_streams(self) -> None:
        """Order the current stream after all that gradients were made on, so that a collective may start from it."""
        if self.streams:
            current = torch.cuda.current_stream(self.spec.device)
            for stream in self.streams:
                if stream != current:
                    current.wait_stream(stream)

    def stash(self, slot: GradSlot) -> None:
        """Keep an unreduced gradient in the bucket's memory, visible as `param.grad`: there is no second copy."""
        grad = slot.param.grad
        if self._sparse or grad is None or slot.attached():
            return
        self._fill(slot, grad, 1.0)
        slot.param.grad = slot.view

    def show(self, slot: GradSlot) -> None:
        """Make a held gradient visible as `param.grad` again, unreduced."""
        if slot.held and not self._sparse:
            slot.param.grad = slot.view
            slot.held = False

    def take(self, slot: GradSlot) -> None:
        """The reverse of `show`: hold the gradient that is visible, so that autograd does not add to it."""
        if slot.attached():
            slot.param.grad = None
            slot.held = True

    def contribute_nothing_new(self, slot: GradSlot, scale: float) -> None:
        """Complete a slot that got no gradient in this backward: with what was there before, else with zeros."""
        grad = slot.param.grad
        if grad is not None:
            if not slot.used:
                slot.kept = grad.clone() if slot.attached() else grad
            self.collect(slot, grad, scale)
        elif not slot.held:
            self.zero(slot)

    def lend(self, slot: GradSlot) -> None:
        """Contribute zeros and keep the gradient that is there, to be given back untouched."""
        grad = slot.param.grad
        slot.kept = grad.clone() if grad is not None and slot.attached() else grad
        slot.param.grad = None
        self.zero(slot)

    def zero(self, slot: GradSlot) -> None:
        if self._sparse:
            self.flat = _no_rows(slot.meta)
        else:
            self._own_view(slot).zero_()

    def put_result(self, result: torch.Tensor | None) -> None:
        """Take the reduced gradients, when a reduction did not leave them in the bucket's own memory."""
        if result is None or result is self.flat:
            return
        if self._sparse:
            self.flat = result
        elif result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view_as(self.flat))

    def hand_back(self, slot: GradSlot, *, touched: bool) -> None:
        """Give the gradient back to the parameter. `touched=False`: no rank used it, so it is as it was before."""
        if not touched:
            if slot.kept is None or self._sparse:
                slot.param.grad = slot.kept
            else:
                slot.param.grad = self._own_view(slot).copy_(slot.kept)
        elif self._sparse:
            slot.param.grad = self.flat
        else:
            slot.param.grad = self._own_view(slot)

    def _collect_sparse(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        if grad.layout != torch.sparse_coo:
            raise RuntimeError(
                f"parameter {slot.meta.name} belongs to a module with sparse=True and so was expected to have a sparse "
                f"gradient, got a dense one; do not share it with a dense layer, or set sparse=False"
            )
        scaled = grad if scale == 1.0 else grad * scale
        self.flat = self.flat + scaled if slot.held else scaled

    def _fill(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"parameter {slot.meta.name} was expected to have a dense gradient, got layout {grad.layout}; only "
                f"torch.nn.Embedding and EmbeddingBag with sparse=True are known to make sparse ones"
            )
        view = self._own_view(slot)
        if grad._is_view() and grad.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr():
            grad = grad.clone()  # another look at our own memory, such as `param.grad.t()`
        if scale == 1.0:
            view.copy_(grad)
        elif grad.dtype is view.dtype:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad).mul_(scale)

    def _own_view(self, slot: GradSlot) -> torch.Tensor:
        """The view, made anew if someone wrote `param.grad.data = ...` and so gave it other memory."""
        if slot.view.data_ptr() != slot.address:
            self.renew_view(slot)
        return slot.view


def _dense(meta: ParamMeta) -> bool:
    """Whether the strides cover the elements exactly once, in some order, so that the view can have them too."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(meta.shape, meta.stride, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _no_rows(meta: ParamMeta) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=meta.device)
    values = torch.empty((0, *meta.shape[1:]), dtype=meta.dtype, device=meta.device)
    return torch.sparse_coo_tensor(indices, values, meta.shape, check_invariants=False)


def is_something(grad: torch.Tensor | None) -> bool:
    """Whether there is a gradient other than the zeros of `zero_grad(set_to_none=False)`."""
    return grad is not None and bool(grad.any() if grad.layout == torch.strided else grad._nnz())
