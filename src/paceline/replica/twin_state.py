"""The state that twins share: the shards of one position, and their optimizer state."""

import weakref
from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from paceline.agree.state_digest import Rotation
from paceline.agree.state_parts import NamedState, optimizer_tensors
from paceline.collectives.subgroup import ShardGroups, ranks_of
from paceline.reducer.shard import Shard


class TwinState:
    """Lists the tensors, and cuts them into the parts that each comparison covers."""

    def __init__(self, groups: ShardGroups, shards: Sequence[Shard], every: int, *, instead: bool) -> None:
        """`every`: the number of comparisons that cover all of them once. `instead`: there is nothing else to compare,
        because no rank has whole parameters; then their blocks are compared too."""
        self.group = groups.twins
        self.positions = groups.shard.size  # ranks in a shard group, and so different shards
        self.instead = instead
        self.rotation = Rotation([], every)
        self.signature = 0
        self._shards = shards

    def list_anew(self, optimizers: Sequence[weakref.ref[Optimizer]]) -> None:
        """List the tensors: an optimizer may have replaced one since."""
        blocks: NamedState = [(shard.name, shard.block) for shard in self._shards] if self.instead else []
        masters = [(f"master of {shard.name}", shard.value) for shard in self._shards if shard.has_master]
        names = {id(shard.value): shard.name for shard in self._shards}
        kept = [pair for known in optimizers for pair in optimizer_tensors(known, names)]
        self.rotation.renew([*blocks, *masters, *sorted(kept, key=lambda pair: pair[0])])
        # Never equal to that of ranks with other shards, even if these have tensors of the same shapes.
        mark = (ranks_of(self.group)[0] + 1) * 0x9E3779B97F4A7C15 & (1 << 62) - 1
        self.signature = self.rotation.signature() ^ mark
