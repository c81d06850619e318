"""How the ranks' copies of one flat tensor are combined: prepared once, since buckets recur in every step."""

from collections.abc import Callable, Sequence

import torch

from paceline.collectives.api import Op
from paceline.collectives.tree import tree_additions

Sources = list[torch.Tensor]

LINE = 64  # bytes; ranks write to different cache lines
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


def view(memory: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements at byte `offset` of an arena."""
    with torch.inference_mode(False):
        return memory[offset : offset + numel * dtype.itemsize].view(dtype)


def cut(numel: int, itemsize: int, owners: int) -> list[tuple[int, int]]:
    """The slice of each owner, as first and last element. The last ones may be empty."""
    grain = max(1, LINE // itemsize)
    step = -(-numel // (grain * owners)) * grain
    return [(min(owner * step, numel), min((owner + 1) * step, numel)) for owner in range(owners)]


class Scratch:
    """Room for two pieces in float32, for sums of half precision."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def two(self, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._room is None:
            with torch.inference_mode(False):
                self._room = torch.empty(2, PIECE // 2, dtype=torch.float32, device="cpu")
        return self._room[0, :numel], self._room[1, :numel]


class Summing:
    """The part of one rank in an all_reduce: it combines its slice of all copies and writes the result to all of them.

    Copies are added in rank order, into the first, so the bits do not depend on who came when. Half precision is added
    in float32 and rounded once. `Op.TREE` is added in the order of the tree and rounded at every node; its partial sums
    lie in the copies, which the result overwrites.
    """

    def __init__(
        self, copies: Sequence[torch.Tensor], op: Op, bounds: tuple[int, int], divide_by: int, scratch: "Scratch"
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

    def _sum(self, piece: "_Piece", divide_by: int) -> None:
        first, *others = piece
        if not self._wide:
            if divide_by > 1 and divide_by & (divide_by - 1) == 0:  # exact, so divide first: the sum may overflow
                first.mul_(1 / divide_by)
                for other in others:
                    torch.add(first, other, alpha=1 / divide_by, out=first)
                return
            for into, part in self._order:
                self._combine(piece[into], piece[part], out=piece[into])
            _divide(first, divide_by)
            return
        total, wide = self._scratch.two(first.numel())
        total.copy_(first)
        for other in others:
            wide.copy_(other)
            self._combine(total, wide, out=total)
        _divide(total, divide_by)
        first.copy_(total)


_Piece = tuple[torch.Tensor, ...]  # of every copy


def _divide(tensor: torch.Tensor, by: int) -> None:
    if by & (by - 1) == 0:
        if by > 1:
            tensor.mul_(1 / by)  # by a power of two this gives the same bits, in less time
    else:
        tensor.div_(by)


def parts_of(memories: Sequence[tuple[torch.Tensor, int]], part: int, numel: int, dtype: torch.dtype) -> Sources:
    """Part number `part`, of `numel` elements, of what lies in each of the memories."""
    return [view(memory, offset + part * numel * dtype.itemsize, numel, dtype) for memory, offset in memories]
