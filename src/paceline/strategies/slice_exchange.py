"""A reduction in which every rank combines one slice of the bucket and sends the result to all, as many bytes as a
ring.

So the combining rank decides the order of the parts, not the transport.
"""

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch.nn.functional import pad

from paceline.collectives.protocols import Transport, Work
from paceline.collectives.spare_memory import SpareMemory
from paceline.strategies.checksums import SliceChecksums
from paceline.strategies.multi_step import Steps

PIECE_BYTES = 8 << 20

# Combines the slices of all ranks: element k has one row per rank, its slice of the k-th tensor sent.
Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def reduce_by_slices(
    flat: torch.Tensor,
    sent: Sequence[torch.Tensor],
    combine: Combine,
    transport: Transport,
    spare: SpareMemory,
    checksums: SliceChecksums | None = None,
) -> Steps:
    """Combine the tensors in `sent` of all ranks, equally many on each, and leave the result in `flat`. With
    `checksums`, received data is compared with what was sent."""
    size = transport.size
    body = flat.numel() // size * size
    over = flat.numel() - body
    rest = flat.new_empty(size)
    if over:  # fewer elements than ranks
        ends = [pad(part[body:], (0, size - over)) for part in sent]
        own = yield from _own_slice(ends, combine, transport, spare, checksums)
        yield transport.all_gather(rest, own)
        if checksums is not None:
            checksums.gathered(rest, own)
    for piece in _pieces(body, flat, size):
        own = yield from _own_slice([part[piece] for part in sent], combine, transport, spare, checksums)
        yield transport.all_gather(flat[piece], own)
        if checksums is not None:
            checksums.gathered(flat[piece], own)
    if over:
        flat[body:] = rest[:over]
    if checksums is not None:
        yield from checksums.compare(transport)


def _pieces(body: int, flat: torch.Tensor, size: int) -> Iterator[slice]:
    """On a host, in pieces: received data needs memory beside the bucket, and this keeps it small. Each is a multiple
    of the number of ranks."""
    most = body if flat.device.type != "cpu" else max(size, PIECE_BYTES // flat.element_size() // size * size)
    return (slice(begin, min(begin + most, body)) for begin in range(0, body, max(1, most)))


def _own_slice(
    sent: Sequence[torch.Tensor],
    combine: Combine,
    transport: Transport,
    spare: SpareMemory,
    checksums: SliceChecksums | None,
) -> Generator[Work, None, torch.Tensor]:
    """The slice of the result that this rank computes."""
    received, lent = [], []
    for part in sent:
        if part.device.type == "cpu":
            lent.append(spare.take(part.numel(), part.dtype))
            slices = lent[-1][: part.numel()]
        else:
            slices = torch.empty_like(part)
        if checksums is not None:
            checksums.sends(part)
        yield transport.all_to_all(slices, part)
        if checksums is not None:
            checksums.received(slices)
        received.append(slices.view(transport.size, -1))
    result = combine(received)
    for memory in lent:
        spare.give_back(memory)
    return result
