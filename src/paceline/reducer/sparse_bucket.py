"""The bucket of one sparse gradient, which brings its own memory in every backward."""

from collections.abc import Sequence

import torch

from paceline.collectives.reduction import GradBucket, LaneBlock
from paceline.layout import BucketSpec, ParamMeta
from paceline.reducer.bucket import Bucket, GradSlot
from paceline.traffic import Collective, CollectiveKind


class SparseBucket(Bucket):
    """A bucket whose `flat` is the gradient itself: a sparse tensor, a new one in every backward."""

    def __init__(self, spec: BucketSpec, slot: GradSlot) -> None:
        super().__init__(spec, [slot], torch.empty(0, dtype=spec.dtype, device=spec.device))
        self.zero(slot)

    @property
    def collective(self) -> Collective | None:
        nbytes = self.flat._indices().nbytes + self.flat._values().nbytes
        return None if self.skipped else Collective(CollectiveKind.ALL_REDUCE, nbytes)

    def renew_view(self, slot: GradSlot) -> None:
        slot.view = self.flat

    def collect(self, scale: float) -> None:
        for slot in self.arrived:
            if (grad := slot.param.grad) is not None and scale != 0.0:
                self._add(slot, grad, scale)
            elif not slot.held:
                self.zero(slot)
            slot.held = True
            slot.param.grad = None
        self.arrived.clear()

    def _add(self, slot: GradSlot, grad: torch.Tensor, scale: float) -> None:
        if grad.layout != torch.sparse_coo:
            raise RuntimeError(
                f"parameter {slot.meta.name} belongs to a module with sparse=True and so was expected to have a sparse "
                f"gradient, got a dense one; do not share it with a dense layer, or set sparse=False"
            )
        scaled = grad if scale == 1.0 else grad * scale
        self.flat = self.flat + scaled if slot.held else scaled

    def zero(self, slot: GradSlot) -> None:
        self.flat = _empty(slot.meta)

    def store_result(self, result: torch.Tensor | None) -> None:
        if result is not None:
            self.flat = result

    def publish_grads(self, slot: GradSlot, *, touched: bool) -> None:
        slot.param.grad = self.flat if touched else slot.kept

    def publish_all(self) -> None:
        for slot in self.slots:
            if not slot.owned_elsewhere:
                slot.param.grad = self.flat

    def grad_bucket(self, blocks: Sequence[LaneBlock] = (), *, last: bool) -> GradBucket:
        return GradBucket(self.spec.index, self.flat, [self.flat], [self.slots[0].param], blocks=blocks, last=last)


def _empty(meta: ParamMeta) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=meta.device)
    values = torch.empty((0, *meta.shape[1:]), dtype=meta.dtype, device=meta.device)
    return torch.sparse_coo_tensor(indices, values, meta.shape, device=meta.device, check_invariants=False)
