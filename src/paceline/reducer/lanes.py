"""The lanes of one step on one rank: the current one, and the sums of those that have run.

    open(lane) ─→ its backward ─→ close(): folded into the sums ─→ open(next lane) … the last one is reduced

A lane's gradients are added to those of the lanes before it in the order of one tree over lane numbers
(`tree_sum.py`), whichever ranks run them. A rank keeps the sums of whole blocks of its lanes, at most one for each
level of the tree: log2(lanes) copies of the gradients in a world of one, and none where each rank runs one lane.
"""

from collections.abc import Sequence
from enum import Enum, auto

import torch

from paceline.blocks import Block, aligned_blocks, lanes_of
from paceline.errors import IllegalMove

Shapes = tuple[tuple[int, ...], ...]  # of all tensors of a microbatch


class LaneState(Enum):
    """The life of one lane."""

    NONE = auto()  # no step is under way
    OPEN = auto()  # its forward and backward run
    CLOSED = auto()  # its gradients are in the sums


_NEXT_STATES = {
    LaneState.NONE: (LaneState.OPEN,),
    LaneState.OPEN: (LaneState.CLOSED, LaneState.NONE),
    LaneState.CLOSED: (LaneState.OPEN, LaneState.NONE),
}


class Lanes:
    """This rank's state of the lanes of the current step."""

    reduces = True  # the last of them is followed by a reduction, for which other ranks wait

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count = count
        self.step = 0  # as counted by the user
        self.failed: int | None = None  # the lane of this step whose backward ended with an exception
        self.backwards = 0  # of the lane that runs
        self.shapes: dict[int, Shapes] = {}  # by lane, of the microbatches with the default weight
        self._shapes: Shapes = ()  # of the lane that runs
        self._sums: dict[int, list[tuple[Block, torch.Tensor]]] = {}  # by bucket, from left to right
        self._free: dict[int, list[torch.Tensor]] = {}
        self.deal(rank, size)

    def deal(self, rank: int, size: int) -> None:
        """Assign the lanes of one of `size` ranks, for all holders of this object."""
        self.mine = lanes_of(rank, size, self.count)
        self.failed = None
        self.forget_memory()
        self.end()

    @property
    def last(self) -> bool:
        """Whether the current lane is the last one of this rank, so that its backward reduces."""
        return self.current == self.mine[-1]

    @property
    def under_way(self) -> bool:
        return self.state is not LaneState.NONE

    @property
    def run(self) -> int:
        """The number of lanes of this step that have run here."""
        return self.current - self.mine[0] + (self.state is LaneState.CLOSED)

    @property
    def holds(self) -> bool:
        """Whether there are sums of earlier lanes of this step."""
        return any(self._sums.values())

    def open(self, lane: int, shapes: Shapes = ()) -> None:
        """Run `lane`, with a microbatch whose tensors have these shapes."""
        self._move(LaneState.OPEN)
        self.current, self.backwards, self._shapes = lane, 0, shapes

    def close(self, weight: float, *, plain: bool = False) -> None:
        """The lane's gradients are complete. `plain`: it has the default weight, so its microbatch must be equally
        large."""
        self._move(LaneState.CLOSED)
        self.weights[self.current] = weight
        if plain:
            self.shapes[self.current] = self._shapes

    def end(self) -> None:
        """The step is over or abandoned: drop its sums. Their memory is kept for the next one."""
        self.state, self.current = LaneState.NONE, -1
        self.cancelled = False  # not all lanes of this step will run here
        self.owed = False  # no lane will run, and the other ranks have not been told
        self.weights = [0.0] * self.count  # of the lanes that have run here; 0 for those of others
        self.shapes.clear()
        for bucket, sums in self._sums.items():
            self._free.setdefault(bucket, []).extend(memory for _, memory in sums)
            sums.clear()

    def cancel_remaining(self) -> None:
        """The lanes that have not run yet will not."""
        self.current, self.cancelled = self.mine[-1], True

    def forget_memory(self) -> None:
        """The buckets were reallocated."""
        self._sums.clear()
        self._free.clear()

    def fold(self, bucket: int, flat: torch.Tensor) -> None:
        """Add the lane's gradients, which are in `flat`, to the sums; `flat` may then be filled by the next lane."""
        block = self._add_left(bucket, flat)
        free = self._free.setdefault(bucket, [])
        memory = free.pop() if free else torch.empty_like(flat)
        self._sums[bucket].append((block, memory.copy_(flat)))

    def blocks(self, bucket: int, flat: torch.Tensor) -> Sequence[tuple[Block, torch.Tensor]]:
        """All sums of this rank, now that its last lane is in `flat`, which holds the last of them."""
        if self.cancelled:  # no rank reads them
            return [(block, flat) for block in aligned_blocks(self.mine.start, len(self.mine))]
        block = self._add_left(bucket, flat)
        return [*self._sums[bucket], (block, flat)]

    def _add_left(self, bucket: int, flat: torch.Tensor) -> Block:
        """Add to `flat` the sums to its left in the tree; returns the block that it then covers."""
        sums = self._sums.setdefault(bucket, [])
        first, width = self.current, 1
        while sums and sums[-1][0] == (first - width, width) and first % (2 * width):
            _, left = sums.pop()
            flat.add_(left)  # the same bits as left + flat
            self._free.setdefault(bucket, []).append(left)
            first, width = first - width, 2 * width
        return first, width

    def _move(self, to: LaneState) -> None:
        if to not in _NEXT_STATES[self.state]:
            raise IllegalMove(f"lane {self.current} cannot go from {self.state.name} to {to.name}")
        self.state = to
