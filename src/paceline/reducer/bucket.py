"""The memory of one bucket, the place of each parameter in it, and the gradients that are views of it."""

import sys
from collections.abc import Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum

import torch

from paceline.collectives.reduction import Flight, GradBucket, LaneBlock
from paceline.errors import IllegalMove
from paceline.layout import BucketSpec, ParamMeta
from paceline.reducer.bucket_shards import BucketShards
from paceline.reducer.grad_streams import GradStreams, raw_stream
from paceline.reducer.shard import Shard
from paceline.reducer.single_gradient import CACHED_BYTES, choose_flushes, move_in, own_view
from paceline.traffic import Collective, CollectiveKind

# For other types, multiplying several tensors in one call rounds differently than multiplying one.
_EXACT = (torch.float32, torch.float64)


class BucketState(Enum):
    """The life of a bucket within one backward. The states follow each other, and the first one follows the last."""

    FILLING = 0  # some gradients are missing
    FULL = 1  # all gradients are in; waits for its turn
    LAUNCHED = 2  # the transport owns the memory until the result was waited for
    REDUCED = 3  # reduced


@dataclass(eq=False, slots=True)
class GradSlot:
    """One parameter's place in its bucket, and its state in the current step."""

    index: int
    meta: ParamMeta
    param: torch.Tensor
    nbytes: int = 0
    owned_elsewhere: bool = False  # another replica that shares the parameter reduces it
    shard: Shard | None = None  # the part of the parameter that this rank owns; None: all of it
    hooks: Sized = ()  # on the parameter, also those of the user
    # Where the gradient lives: set by the bucket, again after every re-layout.
    bucket: "Bucket" = field(init=False)
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    offset: int = 0
    address: int = 0
    flushes: bool = False  # on a host: when this one arrives, the gradients that wait to be copied fill the cache
    # State of the current step.
    fired: bool = False  # autograd has delivered a gradient in this backward
    held: bool = False  # the bucket holds gradients of this step and `param.grad` is None
    used: bool = False  # took part in some backward since the last reduction
    dirty: bool = False  # has gradients that were not reduced
    late: bool = False  # a nested backward delivered more after the bucket had left
    kept: torch.Tensor | None = None  # the gradient to restore if no rank used the parameter

    def __post_init__(self) -> None:
        self.nbytes = self.meta.nbytes

    def only_counts(self) -> bool:
        """Count the bucket down by a gradient that has just arrived, if nothing else has to be done.

        This holds for most gradients, so it is the cost of a hook. Returns False, without any effect, for those that
        complete or flush their bucket, arrive a second time or on another stream, or have user hooks.
        """
        bucket = self.bucket
        if bucket.missing <= 1 or self.fired or self.flushes or self.owned_elsewhere or len(self.hooks) != 1:
            return False
        streams = bucket.streams
        if streams is not None and raw_stream(streams.device_index) != streams.newest:
            return False
        self.fired = self.used = self.dirty = True
        bucket.arrived.append(self)
        bucket.missing -= 1
        return True

    @property
    def grad(self) -> torch.Tensor | None:
        """What is in `param.grad`, unless that is only a stand-in for a sharded gradient."""
        grad = self.param.grad
        return grad if self.shard is None or grad is not self.shard.stand_in else None

    def attached(self) -> bool:
        """Whether `param.grad` is the view into the bucket, and that view still has the bucket's memory."""
        return self.param.grad is self.view and not self.meta.sparse and self.view.data_ptr() == self.address

    def leave_bucket(self) -> None:
        """Keep no reference to the bucket's memory, so that it can be freed before the next one is allocated."""
        del self.bucket
        self.view = torch.empty(0, device="cpu")

    def clear(self) -> None:
        self.used = self.dirty = self.fired = self.held = self.late = False
        self.kept = None

    def clear_backward(self) -> None:
        """The gradients of this backward have been moved elsewhere, but the step continues."""
        self.fired = self.held = self.late = False
        self.kept = None


class Bucket:
    """One flat buffer of gradients that are reduced together.

    Note: the bucket owns its gradients from `collect` until `publish_grads`
    --------------------------------------------------------------------
    A hook only counts: it adds the parameter to `arrived`, whose gradients stay in `param.grad` until `collect` moves
    all of them at once: on a device when the bucket is full, on a host while they are in the cache. From then on
    `param.grad` is None. A nested backward (reentrant checkpointing, weights used twice) may deliver more for the same
    parameter, and autograd adds into whatever `param.grad` is. Before `collect` that is the gradient itself, so nothing
    is lost. After it, were it still the view, it would be memory that the transport may be reading: with None in its
    place autograd makes a new tensor, which is added here, or, when the bucket has left already, in a second round at
    the end.
    """

    def __init__(
        self,
        spec: BucketSpec,
        slots: Sequence[GradSlot],
        flat: torch.Tensor,
        shards: BucketShards | None = None,
    ) -> None:
        """`flat` is the memory. `shards`: the part of the result that this rank keeps; None: all of it."""
        self.spec = spec
        self.shards = shards
        self.in_turn = shards is not None and shards.in_turn  # other buckets use the same memory
        self.key = hash((spec.index, *(place.param for place in spec.slots)))  # its contents and their order
        self.slots = list(slots)
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.arrived: list[GradSlot] = []  # their gradients are in `param.grad`, and not yet in the bucket
        self._zeros: list[GradSlot] = []  # have no gradient, and the memory may not be written to yet
        self.flight: Flight | None = None
        self.skipped = False  # left out of this reduction, because no rank used any of it
        self.flat = flat
        kind = CollectiveKind.ALL_REDUCE if shards is None else CollectiveKind.REDUCE_SCATTER
        self._travels = Collective(kind, flat.nbytes)
        self.on_host = spec.device.type != "cuda"
        self.streams = None if self.on_host else GradStreams(spec.device)
        self.shown_version = -1  # of the memory, when unreduced gradients in it were last made visible
        self._low, self._high = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        for slot, place in zip(self.slots, spec.slots, strict=True):
            slot.bucket = self
            slot.offset = place.offset
            self.renew_view(slot)
            slot.flushes = False
        if self.on_host and not self.in_turn:
            choose_flushes(self.slots)

    def renew_view(self, slot: GradSlot) -> None:
        """Point `slot` at its part of the buffer."""
        slot.view = slot.meta.view_of(self.flat, slot.offset)
        slot.address = slot.view.data_ptr()

    def move(self, to: BucketState) -> None:
        """Enter state `to`; any other than the next one is an internal error."""
        if to.value != (self.state.value + 1) % len(BucketState):
            raise IllegalMove(f"bucket {self.spec.index} cannot go from {self.state.name} to {to.name}")
        self.state = to

    def rearm(self) -> None:
        """Start filling again, from any state, even after a backward that failed half-way."""
        self.state = BucketState.FILLING
        self.missing = len(self.slots)
        self.flight = None
        self.skipped = False
        if self.streams is not None:
            self.streams.forget()
        self.arrived.clear()
        self._zeros.clear()

    def grad_bucket(self, blocks: Sequence[LaneBlock] = (), *, last: bool) -> GradBucket:
        views = [slot.view for slot in self.slots]
        params = [slot.param for slot in self.slots] if self.shards is None else self.shards.params
        spans = () if self.shards is None else self.shards.spans
        return GradBucket(self.spec.index, self.flat, views, params, blocks=blocks, spans=spans, last=last)

    @property
    def result(self) -> list[torch.Tensor]:
        """The reduced gradients that this rank keeps: all of them, or its shards."""
        return [self.flat] if self.shards is None else self.shards.parts

    @property
    def collective(self) -> Collective | None:
        """What of it travels, as stamps tell it. None: nothing."""
        return None if self.skipped else self._travels

    # ---- gradients come

    def arrive(self, slot: GradSlot, scale: float) -> bool:
        """Autograd has added to the parameter's gradient. Returns whether to move the arrived gradients now: on a host
        that is done before it leaves the cache."""
        streams = self.streams
        if streams is not None and raw_stream(streams.device_index) != streams.newest:
            if not self.in_turn:
                self.collect(scale)
            streams.note_current()
        self.arrived.append(slot)
        return slot.flushes

    def collect(self, scale: float) -> None:
        """Move the gradients that have arrived, times `scale`, into the bucket, which owns them from now on."""
        for slot in self._zeros:
            own_view(slot).zero_()
        self._zeros.clear()
        if not self.arrived:
            return
        with nullcontext() if self.streams is None else self.streams.on_newest():
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
        """The views and gradients that one call can copy. The others are moved one by one."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        low, high, strided = self._low, self._high, torch.strided
        # On a host a large gradient is multiplied while it is copied, and not in a second pass over memory.
        large = CACHED_BYTES if self.on_host and scale != 1.0 else sys.maxsize
        if scale == 0.0:
            large = 0  # all of them
        for slot in self.arrived:
            param, view = slot.param, slot.view
            grad = param.grad
            if grad is None:  # dropped by a user hook since
                if not slot.held:
                    own_view(slot).zero_()
            elif (
                slot.held
                or slot.nbytes >= large
                or grad.layout is not strided
                or low <= grad.data_ptr() < high  # the bucket's own memory
                or view.data_ptr() != slot.address
            ):
                move_in(slot, grad, scale)
            else:
                views.append(view)
                grads.append(grad)
            slot.held = True
            param.grad = None
        return views, grads

    def complete(self, scale: float) -> None:
        """All gradients have arrived: move them into memory, ordered before later work of the current stream."""
        if self.in_turn and self.streams is not None:  # the memory is free on the current stream only
            self.streams.join()
        self.collect(scale)
        if self.shards is not None:
            self.shards.clear_gaps()
        if self.streams is not None:
            self.streams.join()

    def zero(self, slot: GradSlot) -> None:
        """Zero this slot, no later than launch."""
        if self.in_turn:
            self._zeros.append(slot)
        else:
            own_view(slot).zero_()

    # ---- the result

    def store_result(self, result: torch.Tensor | None) -> None:
        """Store the reduced gradients, if a reduction did not leave them in the bucket's own memory, and put this
        rank's part where it stays."""
        if result is not None and result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view_as(self.flat))
        if self.shards is not None:
            self.shards.store()

    def publish_grads(self, slot: GradSlot, *, touched: bool) -> None:
        """Set the parameter's gradient. `touched=False`: no rank used it, so restore what was there before."""
        if self.shards is not None:
            self.shards.publish(slot.index, touched=touched)
        elif touched:
            slot.param.grad = slot.view
        else:
            slot.param.grad = None if slot.kept is None else slot.view.copy_(slot.kept)

    def publish_all(self) -> None:
        """The same for all gradients, if every rank used every parameter."""
        for slot in self.slots:
            if slot.owned_elsewhere:
                continue
            if self.shards is None:
                slot.param.grad = slot.view
            else:
                self.shards.publish(slot.index, touched=True)
