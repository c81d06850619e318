"""Which gradients share a bucket: learnt from the first backwards, and agreed by all ranks."""

from collections.abc import Sequence

import torch

from paceline.collectives.api import Transport
from paceline.collectives.reduction import Reduction
from paceline.collectives.wait import finish
from paceline.layout import plan_layout
from paceline.reducer.buckets import BucketSet
from paceline.reducer.settings import ReducerSettings


class Planning:
    """Learns the order in which gradients become ready."""

    def __init__(self, settings: ReducerSettings, transport: Transport) -> None:
        self._settings = settings
        self._transport = transport
        self.order_learned = False
        self.measures = False

    def begin(self, reduction: int) -> None:
        """A reduction begins."""

    def note_ready(self, param: int) -> None:
        """A gradient has become ready."""

    def note_end(self) -> None:
        """The last gradient is there."""

    def after_reduction(
        self, buckets: BucketSet, reduction: Reduction, ready_order: Sequence[int], number: int
    ) -> None:
        """All ranks call it after a reduction in which rank 0 saw gradients become ready."""
        if not self.order_learned:
            self._learn_order(buckets, ready_order)

    def _learn_order(self, buckets: BucketSet, ready_order: Sequence[int]) -> None:
        """Plan buckets in the order in which rank 0 saw gradients become ready, for the next step."""
        seen = set(ready_order)
        rest = [index for index in buckets.layout.order if index not in seen]
        order = torch.tensor([*ready_order, *rest], dtype=torch.int64)
        work = self._transport.broadcast(order, 0)
        finish(work, what="the order of gradients", watch=self._transport.watch, timeout_s=self._settings.timeout_s)
        buckets.plan(plan_layout(buckets.layout.params, order.tolist(), self._settings.caps))
        self.order_learned = True
