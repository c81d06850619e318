"""The reductions that are values: the plain mean, and the mean in a narrower type on the wire."""

from dataclasses import dataclass

import torch

from paceline.collectives.api import Transport
from paceline.collectives.reduction import Flight, GradBucket


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all ranks. Gradients come divided already, so the sum is the mean."""

    divides: bool = False
    chains: bool = False

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        return Flight(transport.all_reduce(bucket.buffer()))


@dataclass(frozen=True, slots=True)
class Wire:
    """The mean, sent in `dtype` (e.g. bfloat16): half the bytes of float32, and its rounding."""

    dtype: torch.dtype
    divides: bool = False
    chains: bool = False

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        full = bucket.buffer()
        narrow = full.to(self.dtype)

        def land() -> None:
            full.copy_(narrow)

        return Flight(transport.all_reduce(narrow), land)
