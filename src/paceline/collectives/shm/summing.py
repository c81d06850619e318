"""How the ranks' copies of one flat tensor are combined."""

from collections.abc import Callable, Sequence

import torch

from paceline.collectives.protocols import Op
from paceline.collectives.tree_sum import tree_additions

PIECE = 1 << 20  # bytes of one copy: what was just summed is still in the cache when it is spread

_COMBINE: dict[Op, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.MEAN: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.TREE: torch.add,
}
_HALF = (torch.float16, torch.bfloat16)


def new_scratch() -> torch.Tensor:
    """Room for two pieces of half precision in float32. It takes memory only once it is used."""
    with torch.inference_mode(False):
        return torch.empty(2, PIECE // 2, dtype=torch.float32, device="cpu")


class Summing:
    """The part of one rank in an all_reduce: it combines its slice of all copies and writes the result to all of them.

    Copies are added in rank order, into the first, so the bits do not depend on timing. Half precision is added
    in float32, in `scratch`, and rounded once. `Op.TREE` is added in the order of the tree and rounded at every node;
    its partial sums lie in the copies, which the result overwrites.
    """

    def __init__(
        self, copies: Sequence[torch.Tensor], op: Op, bounds: tuple[int, int], divide_by: int, scratch: torch.Tensor
    ) -> None:
        first = copies[0]
        self._scratch = scratch
        self._combine = _COMBINE[op]
        self._divide_by = divide_by if op is Op.MEAN else 1
        self._wide = first.dtype in _HALF and op not in (Op.MIN, Op.MAX, Op.TREE)
        others = range(1, len(copies))
        self._order = tree_additions(len(copies)) if op is Op.TREE else [(0, other) for other in others]
        begin, end = bounds
        with torch.inference_mode(False):
            slices = [copy[begin:end] for copy in copies]
            self.result = slices[0]
            pieces = [part.split(max(1, PIECE // first.itemsize)) for part in slices] if end > begin else []
            self._pieces = list(zip(*pieces, strict=True))

    def run(self) -> None:
        """Combine, divide and spread, piece by piece."""
        for piece in self._pieces:
            self._sum(piece, self._divide_by)
            for other in piece[1:]:
                other.copy_(piece[0])

    def scatter(self, ranks: Sequence[int]) -> None:
        """Combine and divide, for these ranks alone."""
        for piece in self._pieces:
            self._sum(piece, self._divide_by, into=ranks[0])
            for other in ranks[1:]:
                piece[other].copy_(piece[ranks[0]])

    def sum(self) -> None:
        """Combine only; the result of this host is then in `result`. Half precision is divided here, or the sum of the
        hosts could overflow."""
        for piece in self._pieces:
            self._sum(piece, self._divide_by if self._wide else 1)

    def spread(self) -> None:
        """Divide what has been made of `result` and write it to all copies."""
        for first, *others in self._pieces:
            if not self._wide:
                _divide(first, self._divide_by)
            for other in others:
                other.copy_(first)

    def _sum(self, piece: "_Piece", divide_by: int, into: int = 0) -> None:
        """Leave the result in the copy of rank `into`. The others are written to as well."""
        first, *others = piece
        if not self._wide:
            if divide_by > 1 and divide_by & (divide_by - 1) == 0:  # exact, so divide first: the sum may overflow
                first.mul_(1 / divide_by)
                for number, other in enumerate(others, 1):
                    out = piece[into] if number == len(others) else first
                    torch.add(first, other, alpha=1 / divide_by, out=out)
                return
            for to, part in self._order:
                self._combine(piece[to], piece[part], out=piece[to])
            _divide(first, divide_by)
            if into:
                piece[into].copy_(first)
            return
        total, wide = self._scratch[:, : first.numel()]
        total.copy_(first)
        for other in others:
            wide.copy_(other)
            self._combine(total, wide, out=total)
        _divide(total, divide_by)
        piece[into].copy_(total)


_Piece = tuple[torch.Tensor, ...]  # of every copy


def _divide(tensor: torch.Tensor, by: int) -> None:
    if by & (by - 1) == 0:
        if by > 1:
            tensor.mul_(1 / by)  # by a power of two this gives the same bits, in less time
    else:
        tensor.div_(by)
