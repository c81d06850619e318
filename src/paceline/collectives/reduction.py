"""How one bucket is combined: the input and output of a reduction, and the plain mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.blocks import Block
from paceline.collectives.protocols import Op, Transport, Work
from paceline.placement import Span

LaneBlock = tuple[Block, torch.Tensor]  # the lanes, and the flat sum of their gradients


class GradBucket:
    """One bucket as a reduction sees it, with the methods of torch's `dist.GradBucket`."""

    __slots__ = ("_blocks", "_buffer", "_gradients", "_index", "_last", "_parameters", "spans")

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *,
        last: bool,
        blocks: Sequence[LaneBlock] = (),
        spans: Sequence[Sequence[Span]] = (),
    ) -> None:
        """`spans`: for each rank of a shard group, the parts of the result that it keeps; empty: all of it."""
        self.spans = spans
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._last = last
        self._blocks = blocks

    def index(self) -> int:
        """The number of the bucket; 0 is launched first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat gradients (a sparse tensor for a sparse gradient)."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the flat gradients, e.g. by compressed ones."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._last

    def blocks(self) -> Sequence[LaneBlock]:
        """The sums of this rank's aligned blocks of lanes, in order; the last one is `buffer()`. None without lanes."""
        return self._blocks


def result_is_in_place() -> None:
    """The result is already in the bucket's own memory."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One reduction in flight: the work to wait for, and how the result then gets into the bucket.

    `result` runs once, after `work` is complete. It returns the reduced flat tensor, or None when it is in place.
    """

    work: Work
    result: Callable[[], torch.Tensor | None] = result_is_in_place


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all ranks: divided in the collective if that is free, else when gradients enter the bucket."""

    multi_step: bool = False
    trivial_alone: bool = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return transport.traits(device).native_mean

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        return Flight(transport.all_reduce(flat, Op.MEAN if transport.traits(flat.device).native_mean else Op.SUM))
