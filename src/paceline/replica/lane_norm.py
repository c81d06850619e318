"""The norm of all gradients in lanes: the same bits however parameters are cut into blocks, and over how many ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.collectives.group import Group
from paceline.placement import BLOCK_ELEMENTS, Ownership

PIECE_LEAVES = (16 << 20) // BLOCK_ELEMENTS  # that are added up together: 64 MiB
NARROW = 16


def norm_in_lanes(
    grads: Mapping[int, torch.Tensor], ownership: Ownership, norm_type: float, group: Group, device: torch.device
) -> torch.Tensor:
    """The norm of all gradients, `grads` holds this rank's flat blocks of them, by parameter. All ranks call it.

    Blocks are made of leaves of `BLOCK_ELEMENTS`. The rank that holds a leaf adds it up in a fixed order, and then all
    ranks add up all leaves in one order: those of other ranks are 0 here, and adding 0 changes nothing.
    """
    counts = [-(-cuts[-1] // BLOCK_ELEMENTS) for cuts in ownership.cuts]
    leaves = torch.zeros(sum(counts), dtype=torch.float64, device=device)
    by_param = leaves.split(counts)
    cut = ownership.ranks > 1
    own: list[_LeafRun] = []
    for index, grad in grads.items():
        begin = ownership.block(index, group.rank if cut else 0)[0] // BLOCK_ELEMENTS
        pieces = grad.split(PIECE_LEAVES * BLOCK_ELEMENTS)
        firsts = range(begin, begin + len(pieces) * PIECE_LEAVES, PIECE_LEAVES)
        places = [by_param[index][first:] for first in firsts]
        own += [_LeafRun(piece, place[: _leaves_of(piece)]) for piece, place in zip(pieces, places, strict=True)]
    for some in _together(own):
        torch._foreach_copy_([piece.sums for piece in some], list(_leaf_sums(some, norm_type, device)))
    if cut:
        group.wait(group.transport.all_reduce(leaves), "the norm of all gradients")
    return (leaves.sum() ** (1 / norm_type)).to(torch.float32)


class _LeafRun(NamedTuple):
    """Consecutive elements of one gradient, starting at a leaf."""

    elements: torch.Tensor
    sums: torch.Tensor  # where the sums of its leaves go


def _leaves_of(flat: torch.Tensor) -> int:
    return -(-flat.numel() // BLOCK_ELEMENTS)


def _together(pieces: Iterable[_LeafRun]) -> Iterator[list[_LeafRun]]:
    """Groups of pieces that are added up together, so that a few kernels serve many parameters."""
    some: list[_LeafRun] = []
    for piece in pieces:
        if some and sum(len(other.sums) for other in some) + len(piece.sums) > PIECE_LEAVES:
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def _leaf_sums(pieces: Sequence[_LeafRun], norm_type: float, device: torch.device) -> Sequence[torch.Tensor]:
    """Add halves until one number is left, because the order in torch's own sum may depend on their count."""
    counts = [len(piece.sums) for piece in pieces]
    rows = torch.zeros(sum(counts), BLOCK_ELEMENTS, device=device)
    flats = [piece.elements for piece in pieces]
    places = [row.view(-1)[: flat.numel()] for row, flat in zip(rows.split(counts), flats, strict=True)]
    torch._foreach_copy_(places, flats)
    sums = rows.mul_(rows) if norm_type == 2.0 else rows.abs_().pow_(norm_type)
    while (half := sums.shape[1] // 2) >= NARROW:
        sums = sums[:, :half] + sums[:, half:]
    sums = sums.t().contiguous()  # short rows are slow to add
    while (half := len(sums) // 2) > 0:
        sums = sums[:half] + sums[half:]
    found: Sequence[torch.Tensor] = sums[0].split(counts)
    return found
