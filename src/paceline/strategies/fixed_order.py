"""The mean whose bits depend on the gradients alone: not on the transport, nor on the cut into buckets or slices."""

from dataclasses import dataclass

import torch

from paceline.collectives.api import Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.tree import tree_sum
from paceline.errors import UsageError
from paceline.strategies.sparse import gather_rows
from paceline.strategies.steps import SteppedWork, Steps


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """The mean over all ranks, added in one binary tree over rank numbers (`collectives.tree`).

    Each rank gets one slice of the bucket from every rank, adds the slices, and gives the result to all: the bytes of a
    ring. Gradients of a 16-bit type are added in float32 and rounded once.
    """

    chains: bool = True
    trivial_alone: bool = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def check_transport(self, transport: Transport, device: torch.device) -> None:
        if not transport.exchanges(device):
            raise UsageError(
                "FixedOrder sends every rank its slice of a bucket, and the transport of this group cannot exchange "
                "slices; use another reduction, or a process group of gloo or NCCL"
            )

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            found: list[torch.Tensor] = []
            return Flight(SteppedWork(_reduce_rows(flat, transport, found)), found.pop)
        return Flight(SteppedWork(_reduce(flat, transport)))


def _reduce(flat: torch.Tensor, transport: Transport) -> Steps:
    size = transport.size
    share = flat.numel() // size
    body, rest = flat[: share * size], flat[share * size :]  # `rest` has fewer elements than there are ranks
    slices = torch.empty_like(body)
    rests = torch.empty(size * rest.numel(), dtype=flat.dtype, device=flat.device)
    if share:
        yield transport.exchange(slices, body)
    if rest.numel():
        yield transport.all_gather(rests, rest.clone())
    if share:
        own = _mean(slices, size, flat.dtype)
        yield transport.all_gather(body, own)
    if rest.numel():
        rest.copy_(_mean(rests, size, flat.dtype))


def _mean(parts: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return tree_sum([part.to(wide) for part in parts.view(size, parts.numel() // size)]).div_(size).to(dtype)


def _reduce_rows(sparse: torch.Tensor, transport: Transport, found: list[torch.Tensor]) -> Steps:
    """The same for the rows of a sparse gradient, with zeros for rows that a rank does not have."""
    gathered = yield from gather_rows(sparse.coalesce(), transport)
    rows, places = torch.unique(torch.cat([part_rows for part_rows, _ in gathered]), return_inverse=True)
    blocks = []
    for (_, values), own_places in zip(gathered, places.split([len(r) for r, _ in gathered]), strict=True):
        block = values.new_zeros((len(rows), *values.shape[1:]))
        block[own_places] = values
        blocks.append(block)
    summed = _mean(torch.stack(blocks), transport.size, sparse.dtype).view_as(blocks[0])
    whole = torch.sparse_coo_tensor(
        rows[None], summed, sparse.shape, device=sparse.device, check_invariants=False, is_coalesced=True
    )
    found.append(whole)
