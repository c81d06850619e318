"""The mean whose bits depend only on the gradients: not on the transport, or on the cut into buckets or slices."""

from dataclasses import dataclass

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.spare_memory import SpareMemory
from paceline.collectives.tree_sum import tree_sum
from paceline.errors import UsageError
from paceline.strategies.multi_step import SteppedWork, Steps
from paceline.strategies.slice_exchange import reduce_by_slices
from paceline.strategies.sparse import gather_rows


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """The mean over all ranks, added in one binary tree over rank numbers (`collectives.tree_sum`).

    Each rank adds one slice of every rank's bucket and sends the result to all, which moves as many bytes as a ring.
    Gradients of a 16-bit type are added in float32 and rounded once.
    """

    multi_step = True
    trivial_alone = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def check_transport(self, transport: Transport, device: torch.device) -> None:
        if not transport.traits(device).all_to_all:
            raise UsageError(
                "FixedOrder sends every rank its slice of a bucket, and the transport of this group cannot exchange "
                "slices; use another reduction, or a process group of gloo or NCCL"
            )

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            found: list[torch.Tensor] = []
            return Flight(SteppedWork(_reduce_rows(flat, transport, found)), found.pop)
        steps = reduce_by_slices(
            flat, [flat], lambda received: _mean(received[0], flat.dtype), transport, SpareMemory()
        )
        return Flight(SteppedWork(steps))


def _mean(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the rows of `parts`, one for each rank."""
    wide = torch.promote_types(dtype, torch.float32)
    return tree_sum([part.to(wide) for part in parts]).div_(len(parts)).to(dtype)


def _reduce_rows(sparse: torch.Tensor, transport: Transport, found: list[torch.Tensor]) -> Steps:
    """The same for the rows of a sparse gradient, with zeros for rows that a rank lacks."""
    gathered = yield from gather_rows(sparse.coalesce(), transport)
    rows, places = torch.unique(torch.cat([part_rows for part_rows, _ in gathered]), return_inverse=True)
    blocks = []
    for (_, values), own_places in zip(gathered, places.split([len(r) for r, _ in gathered]), strict=True):
        block = values.new_zeros((len(rows), *values.shape[1:]))
        block[own_places] = values
        blocks.append(block)
    summed = _mean(torch.stack(blocks), sparse.dtype)
    whole = torch.sparse_coo_tensor(
        rows[None], summed, sparse.shape, device=sparse.device, check_invariants=False, is_coalesced=True
    )
    found.append(whole)
