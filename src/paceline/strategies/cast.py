"""The mean in another type on the wire: a narrower one, which saves bytes, or a wider one, which is rounded once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.collectives.protocols import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.stream_work import used_here
from paceline.strategies.sparse import mean_of_rows


@dataclass(frozen=True, slots=True)
class Wire:
    """The mean, sent in `dtype` (e.g. bfloat16): half the bytes of float32, and its rounding.

    Rows of sparse gradients are sent unchanged, because torch cannot add them in every dtype.
    """

    dtype: torch.dtype

    multi_step = False
    trivial_alone = False

    def divides(self, transport: Transport, device: torch.device) -> bool:
        # float16 overflows above 65504, and a transport may add before it divides.
        return self.dtype is not torch.float16 and transport.traits(device).native_mean

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        full = bucket.buffer()
        op = Op.MEAN if self.divides(transport, full.device) else Op.SUM
        if full.is_sparse:
            return Flight(transport.all_reduce(full, op))
        return _send_as(self.dtype, full, op, transport)


@dataclass(frozen=True, slots=True)
class Wide:
    """The mean of gradients in a narrow type, sent, added and divided in `dtype`, and rounded once."""

    dtype: torch.dtype = torch.float32

    multi_step = False
    trivial_alone = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        narrow = bucket.buffer()
        if narrow.is_sparse:
            return mean_of_rows(narrow, transport)
        return _send_as(torch.promote_types(narrow.dtype, self.dtype), narrow, Op.MEAN, transport)


def mean_in(dtype: torch.dtype, given: Iterable[torch.dtype]) -> Wide | Wire:
    """The mean of gradients of the types `given`, added in `dtype`."""
    return Wide(dtype) if all(torch.promote_types(one, dtype) is dtype for one in given) else Wire(dtype)


def _send_as(dtype: torch.dtype, flat: torch.Tensor, op: Op, transport: Transport) -> Flight:
    sent = flat.to(dtype)

    def result() -> None:
        flat.copy_(sent)
        used_here(sent)

    return Flight(transport.all_reduce(sent, op), result)
