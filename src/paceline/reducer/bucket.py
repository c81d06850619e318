"""The memory of one bucket, and the gradients that are views of it."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum, auto

import torch

from paceline.collectives.reduction import Flight, GradBucket, LaneBlock
from paceline.errors import IllegalMove
from paceline.layout import BucketSpec, ParamMeta
from paceline.reducer.autograd import raw_stream
from paceline.reducer.slot import GradSlot

# On a host gradients are copied while they are still in the cache: when so many bytes, or so many gradients, wait.
CACHED_BYTES = 64 * 1024
TOGETHER = 64
# Products of several tensors of other types at once are rounded another way than those of one.
_EXACT = (torch.float32, torch.float64)


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
    """One flat buffer of gradients that are reduced together.

    Note: the bucket owns its gradients from `collect` until `hand_back`
    --------------------------------------------------------------------
    A hook only counts: it adds the parameter to `arrived`, whose gradients stay in `param.grad` until `collect` moves
    all of them at once: on a device when the bucket is full, on a host while they are in the cache. From then on
    `param.grad` is None. A nested backward (reentrant checkpointing, weights used twice) may deliver more for the same
    parameter, and autograd adds into whatever `param.grad` is. Before `collect` that is the gradient itself, so nothing
    is lost. After it, were it still the view, it would be memory that the transport may be reading: with None in its
    place autograd makes a new tensor, which is added here, or, when the bucket has left already, in a second round at
    the end.
    """

    def __init__(self, spec: BucketSpec, slots: Sequence[GradSlot], flat: torch.Tensor | None) -> None:
        """`flat` is the memory; None for a sparse gradient, which brings its own."""
        self.spec = spec
        self.key = hash((spec.index, *(place.param for place in spec.slots)))  # what is in it, and in which order
        self.slots = list(slots)
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.arrived: list[GradSlot] = []  # their gradients are in `param.grad`, and not in memory yet
        self.flight: Flight | None = None
        self.skipped = False  # left out of this reduction, because no rank used any of it
        self.streams: list[torch.cuda.Stream] = []  # that the gradients in it were made on
        self.flat = _no_rows(slots[0].meta) if flat is None else flat
        self.on_host = spec.device.type != "cuda"
        self.device_index = spec.device.index or 0
        self.stream = -1  # the number of the stream that the last gradient was made on
        self._sparse = spec.sparse
        self._version = -1  # of the memory, when the gradients in it were last shown
        self._low = 0 if flat is None else flat.data_ptr()
        self._high = self._low + (0 if flat is None else flat.nbytes)
        for slot, place in zip(self.slots, spec.slots, strict=True):
            slot.bucket = self
            slot.offset = place.offset
            self.renew_view(slot)
        if self.on_host:
            self._choose_flushes()

    def _choose_flushes(self) -> None:
        """Gradients that come in this order are copied while they are in the cache; in another, sooner or later."""
        waiting = nbytes = 0
        for slot in self.slots:
            waiting, nbytes = waiting + 1, nbytes + slot.nbytes
            slot.flushes = waiting == TOGETHER or nbytes >= CACHED_BYTES
            if slot.flushes:
                waiting = nbytes = 0

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
        self.stream = -1
        self.streams.clear()
        self.arrived.clear()

    def grad_bucket(self, blocks: Sequence[LaneBlock] = (), *, last: bool) -> GradBucket:
        views = [self.flat] if self._sparse else [slot.view for slot in self.slots]
        params = [slot.param for slot in self.slots]
        return GradBucket(self.spec.index, self.flat, views, params, blocks=blocks, last=last)

    # ---- gradients come

    def arrive(self, slot: GradSlot, scale: float) -> bool:
        """Autograd has added to the parameter's gradient. Returns whether to move what has arrived now: on a host that
        is done before it leaves the cache."""
        if not self.on_host and raw_stream(self.device_index) != self.stream:
            self._change_stream(scale)
        self.arrived.append(slot)
        return slot.flushes

    def _change_stream(self, scale: float) -> None:
        """The gradients that come now are made on the current stream, and not on that of those before them."""
        self.collect(scale)
        self.stream = raw_stream(self.device_index)
        stream = torch.cuda.current_stream(self.spec.device)
        self.streams = [*(other for other in self.streams if other != stream), stream]

    def collect(self, scale: float) -> None:
        """Move the gradients that have arrived, times `scale`, into the bucket, which owns them from now on."""
        if not self.arrived:
            return
        with torch.cuda.stream(self.streams[-1]) if self._made_elsewhere() else nullcontext():
            views, grads = self._take_plain_ones(scale)
            if grads:
                torch._foreach_copy_(views, grads)
                if scale == 1.0:
                    pass
                elif self.flat.dtype in _EXACT:
                    torch._foreach_mul_(views, scale)
                else:
                    for view in views:
                        view.mul_(scale)
        self.arrived.clear()

    def _take_plain_ones(self, scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of what has arrived, views and gradients to be copied by one call. The others are moved one by one."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        low, high, strided = self._low, self._high, torch.strided
        # On a host a large gradient is multiplied on its way, and not in a second round through memory.
        large = CACHED_BYTES if self.on_host and scale != 1.0 else sys.maxsize
        if self._sparse or scale == 0.0:
            large = 0  # all of them
        for slot in self.arrived:
            param, view = slot.param, slot.view
            grad = param.grad
            if grad is None:  # thrown away by a hook of the user's since
                if not slot.held:
                    self.zero(slot)
            elif (
                slot.held
                or slot.nbytes >= large
                or grad.layout is not strided
                or low <= grad.data_ptr() < high  # the bucket's own memory
                or view.data_ptr() != slot.address
            ):
                self._collect_one(slot, grad, scale)
            else:
                views.append(view)
                grads.append(grad)
            slot.held = True
            param.grad = None
        return views, grads

    def _collect_one(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
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

    def complete(self, scale: float) -> None:
        """All gradients have come: have them in memory for whoever goes on from the current stream."""
        self.collect(scale)
        if len(self.streams) > 1 or self._made_elsewhere():
            current = torch.cuda.current_stream(self.spec.device)
            for stream in self.streams:
                if stream != current:
                    current.wait_stream(stream)

    def _made_elsewhere(self) -> bool:
        """Whether the last gradient was made on another stream than the current one."""
        return self.stream != -1 and raw_stream(self.device_index) != self.stream

    def keep(self, scale: float, *, held: bool) -> None:
        """Move what has arrived into the bucket's memory: `held`, times `scale`, or visible as `param.grad`."""
        if held:
            self.collect(scale)
        else:
            self.accumulate()

    def accumulate(self) -> None:
        """Keep what has arrived in the bucket's memory, unreduced and visible as `param.grad`: there is no second
        copy of the gradients."""
        slots = [] if self._sparse else [slot for slot in self.arrived if slot.param.grad is not None]
        self.arrived = [slot for slot in slots if not slot.attached()]
        self.collect(1.0)
        for slot in slots:
            self.show(slot)
        self.arrived.clear()

    # ---- gradients are shown, kept and lent

    def show(self, slot: GradSlot) -> None:
        """Make a held gradient visible as `param.grad` again, unreduced."""
        if slot.held and not self._sparse:
            slot.param.grad = slot.view
            slot.held = False

    def note_shown(self) -> None:
        """From now on notice whether somebody writes to the gradients that are visible."""
        self._version = self.flat._version

    def is_untouched(self) -> bool:
        return self.flat._version == self._version

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
            self.arrived.append(slot)
            self.collect(scale)
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

    # ---- the result

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
    return torch.sparse_coo_tensor(indices, values, meta.shape, device=meta.device, check_invariants=False)
