"""The memory of buckets, cut from one piece per device."""

import torch

from paceline.collectives.protocols import Transport
from paceline.errors import BucketsTooLarge
from paceline.layout import ALIGN_BYTES, Layout


def allocate(layout: Layout, transport: Transport, turns: int | None = None) -> list[torch.Tensor | None]:
    """The memory of every bucket. None for sparse ones, whose gradients bring theirs. `turns`: so many buckets have
    memory at a time, one after another in the same places."""
    ends: dict[torch.device, int] = {}
    places: list[int] = []
    largest = max(_whole_lines(spec.nbytes) for spec in layout.buckets)
    for spec in layout.buckets:
        start = ends.get(spec.device, 0) if turns is None else spec.index % turns * largest
        places.append(start)
        if not spec.sparse:
            ends[spec.device] = max(ends.get(spec.device, 0), start + _whole_lines(spec.nbytes))
    pieces = {device: _piece(nbytes, device, layout, transport) for device, nbytes in ends.items()}
    return [
        None if spec.sparse else pieces[spec.device][start : start + spec.nbytes].view(spec.dtype)
        for spec, start in zip(layout.buckets, places, strict=True)
    ]


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _piece(nbytes: int, device: torch.device, layout: Layout, transport: Transport) -> torch.Tensor:
    try:
        return transport.allocate(nbytes, torch.uint8, device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise BucketsTooLarge(
            f"rank {transport.rank} could not allocate {nbytes:,} bytes on {device} for the gradients of "
            f"{len(layout.params)} parameters in {len(layout.buckets)} buckets: {error}; use a smaller model, freeze "
            f"parameters, or free memory before wrapping"
        ) from error
