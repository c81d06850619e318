"""The sum over all lanes, in one binary tree over lane numbers: the same bits on any number of ranks."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from paceline.blocks import Block, aligned_blocks, lanes_of
from paceline.collectives.protocols import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket, LaneBlock
from paceline.collectives.spare_memory import SpareMemory
from paceline.collectives.tree_sum import tree_sum_of_blocks
from paceline.errors import UsageError
from paceline.strategies.checksums import SliceChecksums
from paceline.strategies.multi_step import SideStream, SteppedWork, Steps
from paceline.strategies.slice_exchange import reduce_by_slices

# Called with a bucket, and the rank whose message about it was damaged on its way here.
OnDamage = Callable[[int, int], None]


class LaneSum:
    """The sum of the gradients of all lanes. A rank contributes the sums of its aligned blocks: `GradBucket.blocks`.

    If every rank has one block and the tree over ranks is that over blocks, one collective suffices if the transport
    supports it (`Op.TREE`). Otherwise each rank adds one slice of every block and sends the result to all. On a device
    this is queued on a stream of its own, so that neither the next bucket nor the host waits. Every node of the tree is
    rounded to the type of the gradients, and nothing is divided.
    """

    trivial_alone = False

    def __init__(
        self,
        lanes: int,
        transport: Transport | None = None,
        device: torch.device | None = None,
        on_damage: OnDamage | None = None,
    ) -> None:
        """With the transport known (and the device of the gradients), several buckets are in flight at a time where
        possible. Without, one at a time, which is always correct. Replicas do not share a LaneSum: see `SideStream`.
        `on_damage`: compare slices that travel between processes with what was sent, and call this for each that
        differs."""
        if lanes < 1:
            raise UsageError(f"lanes must be at least 1, got {lanes}")
        self.lanes = lanes
        self._on_damage = on_damage
        self._side = SideStream()
        self._spare = SpareMemory()
        self.multi_step = transport is None or self._must_chain(transport, device or torch.device("cpu"))

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return False

    def check_transport(self, transport: Transport, device: torch.device) -> None:
        if not self._in_one(transport, device) and not transport.traits(device).all_to_all:
            raise UsageError(
                f"lanes={self.lanes} over {transport.size} ranks sends every rank its slice of a bucket, and the "
                f"transport of this group cannot exchange slices; use a process group of gloo or NCCL"
            )

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat, blocks = bucket.buffer(), bucket.blocks()
        self._check(bucket, transport)
        if transport.size == 1 and len(blocks) > 1:
            flat.copy_(tree_sum_of_blocks(dict(blocks), self.lanes))
        if transport.size == 1 or self._in_one(transport, flat.device):
            return Flight(transport.all_reduce(flat, Op.TREE))
        checksums = None
        if self._on_damage is not None and self._can_check(transport, flat.device):
            checksums = SliceChecksums(transport.size, partial(self._on_damage, bucket.index()))
        steps = _reduce(flat, blocks, self.lanes, transport, self._spare, checksums)
        if _queues(transport, flat.device):
            return Flight(self._side.run(steps, flat.device, uses=[flat, *(part for _, part in blocks)]))
        return Flight(SteppedWork(steps))

    def _in_one(self, transport: Transport, device: torch.device) -> bool:
        """Whether one collective of the transport adds in the same tree as over lanes."""
        if self._on_damage is not None and self._can_check(transport, device):
            return False
        return _is_tree_of_ranks(self.lanes, transport.size) and transport.traits(device).tree_sum

    def _can_check(self, transport: Transport, device: torch.device) -> bool:
        """Whether checksums of slices can be compared: on hosts, and not in shared memory."""
        traits = transport.traits(device)
        return device.type == "cpu" and traits.all_to_all and not traits.progress_on_caller

    def _must_chain(self, transport: Transport, device: torch.device) -> bool:
        return transport.size > 1 and not (self._in_one(transport, device) or _queues(transport, device))

    def _check(self, bucket: GradBucket, transport: Transport) -> None:
        expected, blocks = _cut(self.lanes, transport.size)[transport.rank], bucket.blocks()
        found = tuple(block for block, _ in blocks)
        if found != expected or (blocks and blocks[-1][1].data_ptr() != bucket.buffer().data_ptr()):
            raise UsageError(
                f"rank {transport.rank} of {transport.size} was expected to contribute blocks {list(expected)} (first "
                f"lane, width) of {self.lanes} lanes in bucket {bucket.index()}, the last of them in the bucket's own "
                f"buffer, got {list(found)}"
            )
        if not self.multi_step and self._must_chain(transport, bucket.buffer().device):
            raise UsageError(
                f"this LaneSum was made for another transport than that of rank {transport.rank}, over which "
                f"buckets must be reduced one at a time; make a new one with LaneSum(lanes, transport, device)"
            )


def _queues(transport: Transport, device: torch.device) -> bool:
    return device.type == "cuda" and transport.traits(device).stream_ordered


@cache
def _cut(lanes: int, size: int) -> tuple[tuple[Block, ...], ...]:
    """The blocks of every rank."""
    mine = (lanes_of(rank, size, lanes) for rank in range(size))
    return tuple(tuple(aligned_blocks(own.start, len(own))) for own in mine)


@cache
def _is_tree_of_ranks(lanes: int, size: int) -> bool:
    """Whether every rank has one block, of one width; the last one's may end early, as the tree itself does."""
    blocks = _cut(lanes, size)
    return all(len(own) == 1 and own[0][0] == rank * blocks[0][0][1] for rank, own in enumerate(blocks))


def _reduce(
    flat: torch.Tensor,
    blocks: Sequence[LaneBlock],
    lanes: int,
    transport: Transport,
    spare: SpareMemory,
    checksums: SliceChecksums | None,
) -> Steps:
    """Leave the sum of all blocks of all ranks in `flat`, which is the last of this rank's blocks."""
    cut = _cut(lanes, transport.size)
    # A rank with fewer blocks than others sends one again, which no rank adds.
    sent = [part for _, part in blocks] + [flat] * (max(map(len, cut)) - len(blocks))

    def add(received: Sequence[torch.Tensor]) -> torch.Tensor:
        by_block = {block: received[k][rank] for rank, own in enumerate(cut) for k, block in enumerate(own)}
        return tree_sum_of_blocks(by_block, lanes)

    return reduce_by_slices(flat, sent, add, transport, spare, checksums)
