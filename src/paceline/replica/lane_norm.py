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
    """The norm of all gradients, of which `grads` has this rank's flat blocks, by parameter. All ranks call it.

    Blocks are made of leaves of `BLOCK_ELEMENTS`. Whoever has a leaf adds it up in one order, and then all ranks add up
    all leaves in one order: those of other ranks are 0 here, and adding 0 changes nothing.
    """
    counts = [-(-cuts[-1] // BLOCK_ELEMENTS) for cuts in ownership.cuts]
    leaves = torch.zeros(sum(counts), dtype=torch.float64, device=device)
    by_param = leaves.split(counts)
    cut = ownership.ranks > 1
    own: list[_Piece] = []
    for index, grad in grads.items():
        begin = ownership.block(index, group.rank if cut else 0)[0] // BLOCK_ELEMENTS
        pieces = grad.split(PIECE_LEAVES * BLOCK_ELEMENTS)
        firsts = range(begin, begin + len(pieces) * PIECE_LEAVES, PIECE_LEAVES)
        places = [by_param[index][first:] for first in firsts]
        own += [_Piece(piece, place[: _leaves_of(piece)]) for piece, place in zip(pieces, places, strict=True)]
    for some in _together(own):
        torch._foreach_copy_([piece.sums for piece in some], list(_leaf_sums(some, norm_type, device)))
    if cut:
        group.wait(group.transport.all_reduce(leaves), "the norm of all gradients")
    return (leaves.sum() ** (1 / norm_type)).to(torch.float32)


class _Piece(NamedTuple):
    """Consecutive elements of one gradient, from the begin of a leaf on."""

    elements: torch.Tensor
    sums: torch.Tensor  # where those of its leaves go


def _leaves_of(flat: torch.Tensor) -> int:
    return -(-flat.numel() // BLOCK_ELEMENTS)


def _together(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are added up together: a few kernels for many parameters."""
    some: list[_Piece] = []
    for piece in pieces:
        if some and sum(len(other.sums) for other in some) + len(piece.sums) > PIECE_LEAVES:
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def _leaf_sums(pieces: Sequence[_Piece], norm_type: float, device: torch.device) -> Sequence[torch.Tensor]:
    """Halves are added until one number is left: the order inside torch's own sum may depend on how many there are."""
    counts = [len(piece.sums) for piece in pieces]
    rows = torch.zeros(sum(counts), BLOCK_ELEMENTS, device=device)
    flats = [piece.elements for piece in pieces]
    places = [row.view(-1)[: flat.numel()] for row, flat in zip(rows.split(counts), flats, strict=True)]
    torch._foreach_copy_(places, flats)
    sums = rows.mul_(rows) if norm_type == 2.0 else rows.abs_().pow_(norm_type)
    while (half := sums.shape[1] // 2) >= NARROW:
        sums = sums[:, :half] + sums[:, half:]
    sums = sums.t().contiguous()  # short rows are added slowly, long ones of what is left are not
    while (half := len(sums) // 2) > 0:
        sums = sums[:half] + sums[half:]
    found: Sequence[torch.Tensor] = sums[0].split(counts)
    return found
