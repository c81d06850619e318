"""The part of a reduced bucket that one rank keeps if gradients are sharded."""

from collections.abc import Mapping, Sequence

import torch

from paceline.layout import BucketSpec, aligned
from paceline.placement import Span
from paceline.reducer.shard import Shard, flat_of


class BucketShards:
    """This rank's blocks of the gradients in one bucket: in its memory, or in memory of their own."""

    def __init__(
        self,
        spec: BucketSpec,
        flat: torch.Tensor,
        shards: Mapping[int, Shard],
        spans: Sequence[Sequence[Span]],
        rank: int,
        *,
        in_turn: bool,
    ) -> None:
        """`shards`: of this rank, by parameter. `spans`: which parts of the bucket each rank of a shard group keeps.
        `in_turn`: other buckets use its memory too, so that blocks are kept elsewhere."""
        self.spans = spans
        self.in_turn = in_turn
        self._shards = shards
        own = [shards[place.param] for place in spec.slots]
        # For reductions: for a parameter without memory, a stand-in that raises when its values are used.
        self.params = [shard.param if shard.front is None else shard.front for shard in own]
        self._reduced = {
            place.param: flat[place.offset : place.offset + place.numel][slice(*shards[place.param].span)]
            for place in spec.slots
        }
        self._blocks = self._reduced
        self.parts = [flat[slice(*span)] for span in spans[rank % len(spans)]]  # all that this rank keeps
        if in_turn:
            sizes = [aligned(block.numel(), flat.dtype) for block in self._reduced.values()]
            # Zeros: the space between blocks is checked together with them.
            memory = torch.zeros(sum(sizes), dtype=flat.dtype, device=flat.device)
            rows = zip(memory.split(sizes), self._reduced.items(), strict=True)
            self._blocks = {param: row[: block.numel()] for row, (param, block) in rows}
            self.parts = [memory]

        ends = [place.offset + place.numel for place in spec.slots]
        begins = [*(place.offset for place in spec.slots[1:]), spec.numel]
        gaps = [flat[end:begin] for end, begin in zip(ends, begins, strict=True) if begin > end]
        self._gaps = gaps if in_turn else []  # between gradients, where other buckets store theirs

    def clear_gaps(self) -> None:
        """Zero the space between the gradients, which is reduced and checked together with them."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def store(self) -> None:
        """After the reduction: move the blocks to where they stay."""
        if self.in_turn:
            torch._foreach_copy_(list(self._blocks.values()), list(self._reduced.values()))

    def add(self, param: int, extra: torch.Tensor) -> None:
        """Add to the reduced gradient of a parameter; `extra` is shaped like it."""
        self._blocks[param].add_(flat_of(extra)[slice(*self._shards[param].span)])

    def publish(self, param: int, *, touched: bool) -> None:
        """Pass the gradient to the optimizer. `touched=False`: no rank used the parameter."""
        self._shards[param].publish(self._blocks[param] if touched else None)
