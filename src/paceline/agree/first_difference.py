"""The first element that differs between two ranks' results, when their digests do not agree."""

from collections.abc import Sequence

import torch

from paceline.agree.drift import CHUNK_BYTES, Element, element_index
from paceline.agree.state_digest import Piece, state_digest
from paceline.collectives.gather import gather_bytes, gather_ints
from paceline.collectives.group import Group

_NOWHERE = -1


def first_difference(
    pieces: Sequence[Piece], group: Group, ranks: tuple[int, int], what: str
) -> tuple[str, Element | None]:
    """The name of the first piece that is not equal on two ranks, and the first element of it that differs.

    All ranks call it, with pieces of the same names and sizes; only those of `ranks` are looked at. `what` names the
    wait. The name is empty if all pieces are equal.
    """
    one, other = ranks
    mine = [state_digest([piece.flat()]) if group.rank in ranks else 0 for piece in pieces]
    digests = gather_ints(group, mine, what)
    unequal = [n for n in range(len(pieces)) if digests[one][n] != digests[other][n]]
    if not unequal:
        return "", None
    piece = pieces[unequal[0]]
    return piece.name, _first_element(piece, group, one, other, what)


def _first_element(piece: Piece, group: Group, one: int, other: int, what: str) -> Element | None:
    """Rank `one` sends its values until rank `other` finds one that differs from its own."""
    flat = piece.flat().cpu().contiguous()
    width = max(1, CHUNK_BYTES // flat.dtype.itemsize)
    for begin in range(0, flat.numel(), width):
        chunk = flat[begin : begin + width].clone().view(torch.uint8)
        group.wait(group.transport.broadcast(chunk, one), what)
        at = _NOWHERE
        if group.rank == other:
            differ = (chunk != flat[begin : begin + width].view(torch.uint8)).nonzero()
            at = begin + int(differ[0]) // flat.dtype.itemsize if len(differ) else _NOWHERE
        if (found := gather_ints(group, [at], what)[other][0]) != _NOWHERE:
            return _element(piece, flat, found, group, (one, other), what)
    return None


def _element(
    piece: Piece, flat: torch.Tensor, at: int, group: Group, ranks: tuple[int, int], what: str
) -> Element | None:
    own = bytes(flat[at : at + 1].view(torch.uint8).tolist()) if group.rank in ranks else b""
    raws = [gathered for rank, gathered in enumerate(gather_bytes(group, own, what)) if rank in ranks]
    values = tuple(torch.frombuffer(bytearray(raw), dtype=flat.dtype).tolist()[0] for raw in raws)
    bits = tuple(int.from_bytes(raw, "little") for raw in raws)
    return Element(element_index(piece, at), flat.dtype, bits, values, tuple(sorted(ranks)))
