"""The memory of one bucket, and the gradients that are views of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum, auto

import torch

from paceline.collectives.reduction import Flight, GradBucket, LaneBlock
from paceline.errors import IllegalMove
from paceline.layout import BucketSpec, ParamMeta
from paceline.reducer.arrivals import SMALL_BYTES, Arrivals
from paceline.reducer.slot import GradSlot


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


class Bucket:
    """One flat buffer of gradients that are reduced together."""

    def __init__(self, spec: BucketSpec, slots: Sequence[GradSlot], flat: torch.Tensor | None) -> None:
        """`flat` is the memory; None for a sparse gradient, which brings its own."""
        self.spec = spec
        self.key = hash((spec.index, *(place.param for place in spec.slots)))  # what is in it, and in which order
        self.slots = list(slots)
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.flight: Flight | None = None
        self.skipped = False  # left out of this reduction, because no rank used any of it
        self.streams: list[torch.cuda.Stream] = []  # that the gradients in it were made on
        self.flat = _no_rows(slots[0].meta) if flat is None else flat
        self._sparse = spec.sparse
        self._on_stream = spec.device.type == "cuda"
        self._arrivals = Arrivals(torch.empty(0) if flat is None else flat)
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
        slot.small = slot.meta.nbytes <= SMALL_BYTES

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
        self._arrivals.drop()

    def grad_bucket(self, blocks: Sequence[LaneBlock] = (), *, last: bool) -> GradBucket:
        views = [self.flat] if self._sparse else [slot.view for slot in self.slots]
        params = [slot.param for slot in self.slots]
        return GradBucket(self.spec.index, self.flat, views, params, blocks=blocks, last=last)

    def collect(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        """Move `grad`, which is `param.grad`, times `scale` into the bucket, which owns it until it hands it back.

        Note: the bucket owns its gradients while a backward runs
        ---------------------------------------------------------
        `param.grad` is None from here until `hand_back`. A nested backward (reentrant checkpointing, weights used
        twice) may deliver more for the same parameter, and autograd adds into whatever `param.grad` is: into memory
        that the transport may be reading at that moment, if it were still the view. With None in its place autograd
        makes a new tensor, which is added here, or, when the bucket has left already, in a second round at the end.
        """
        if self._on_stream:
            self._note_stream()
        if not slot.small or slot.held or grad is slot.view or not self._arrivals.admit(slot, grad, scale):
            self._collect_one(slot, grad, scale)
        slot.held = True
        slot.param.grad = None

    def _collect_one(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        if slot.held or scale != self._arrivals.scale:
            self.flush()
            self._arrivals.start(scale)
        if scale == 0.0:  # not a product: a rank without tokens may well have a gradient that is not finite
            if not slot.held:
                self.zero(slot)
        elif self._sparse:
            self._collect_sparse(slot, grad, scale)
        elif slot.held:
            slot.view.add_(grad, alpha=scale)
        elif grad is not slot.view or slot.view.data_ptr() != slot.address:
            self._fill(slot, grad, scale)
        elif scale != 1.0:
            slot.view.mul_(scale)

    def flush(self) -> None:
        """Have the small gradients that have arrived in memory."""
        if self._arrivals:
            with torch.cuda.stream(self.streams[-1]) if self.streams else nullcontext():
                self._arrivals.copy()

    def _note_stream(self) -> None:
        """Remember the stream of the gradient that comes next; those that arrived on another one are copied there."""
        stream = torch.cuda.current_stream(self.spec.device)
        if not self.streams or stream != self.streams[-1]:
            self.flush()
            if stream in self.streams:
                self.streams.remove(stream)
            self.streams.append(stream)

    def complete(self) -> None:
        """All gradients are in: have them in memory for whoever goes on from the current stream."""
        self.flush()
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
            self.flush()
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
        if touched:
            slot.param.grad = self.flat if self._sparse else slot.view
        elif slot.kept is None or self._sparse:
            slot.param.grad = slot.kept
        else:
            slot.param.grad = slot.view.copy_(slot.kept)

    def hand_all_back(self) -> None:
        """The same for all gradients, where every rank used every parameter."""
        for slot in self.slots:
            if not slot.asleep:
                slot.param.grad = self.flat if self._sparse else slot.view

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
