"""The reductions that are values: the plain mean, and the mean in a narrower type on the wire."""

from dataclasses import dataclass

import torch

from paceline.collectives.api import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket, used_here


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all ranks: divided in the collective where that is free, else on the way into the bucket."""

    chains: bool = False
    trivial_alone: bool = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return transport.averages(device)

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        return Flight(transport.all_reduce(flat, Op.MEAN if transport.averages(flat.device) else Op.SUM))


@dataclass(frozen=True, slots=True)
class Wire:
    """The mean, sent in `dtype` (e.g. bfloat16): half the bytes of float32, and its rounding.

    Rows of sparse gradients are sent as they are, because torch does not add them in every type.
    """

    dtype: torch.dtype
    chains: bool = False
    trivial_alone: bool = False

    def divides(self, transport: Transport, device: torch.device) -> bool:
        # float16 ends at 65504, and a transport may add before it divides.
        return self.dtype is not torch.float16 and transport.averages(device)

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        full = bucket.buffer()
        op = Op.MEAN if self.divides(transport, full.device) else Op.SUM
        if full.is_sparse:
            return Flight(transport.all_reduce(full, op))
        narrow = full.to(self.dtype)

        def land() -> None:
            full.copy_(narrow)
            used_here(narrow)

        return Flight(transport.all_reduce(narrow, op), land)
