"""The buckets of a layout, and their memory, allocated as one piece per device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.collectives.protocols import Transport
from paceline.errors import BucketsTooLarge
from paceline.layout import ALIGN_BYTES, BucketSpec, Layout
from paceline.placement import Ownership
from paceline.reducer.bucket import Bucket, GradSlot
from paceline.reducer.bucket_shards import BucketShards
from paceline.reducer.shard import Shard
from paceline.reducer.sparse_bucket import SparseBucket


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which part of the reduced gradients this rank keeps."""

    ownership: Ownership | None = None  # None: every rank keeps all of them
    shards: Sequence[Shard] = ()  # this rank's part of each parameter
    turns: int | None = None  # this many buckets have memory at a time; None: all


WHOLE = Sharding()


def make_buckets(layout: Layout, slots: Sequence[GradSlot], transport: Transport, sharding: Sharding) -> list[Bucket]:
    """The buckets of `layout`, with every slot pointing into its own."""
    memory = allocate(layout, transport, sharding.turns)
    return [
        _bucket(spec, [slots[place.param] for place in spec.slots], flat, sharding, transport.rank)
        for spec, flat in zip(layout.buckets, memory, strict=True)
    ]


def _bucket(
    spec: BucketSpec, slots: Sequence[GradSlot], flat: torch.Tensor | None, sharding: Sharding, rank: int
) -> Bucket:
    if flat is None:
        return SparseBucket(spec, slots[0])
    if sharding.ownership is None:
        return Bucket(spec, slots, flat)
    shards = {place.param: sharding.shards[place.param] for place in spec.slots}
    spans, in_turn = sharding.ownership.spans(spec), sharding.turns is not None
    return Bucket(spec, slots, flat, BucketShards(spec, flat, shards, spans, rank, in_turn=in_turn))


def allocate(layout: Layout, transport: Transport, turns: int | None = None) -> list[torch.Tensor | None]:
    """The memory of every bucket. None for sparse ones, whose gradients bring their own. `turns`: this many buckets
    have memory at a time, one after another in the same places."""
    ends: dict[torch.device, int] = {}
    places: list[int] = []
    # The largest of the buckets that share a place sets its size.
    taking_turns = [layout.buckets[turn::turns] for turn in range(turns or 0)]
    sizes = [max((_whole_lines(spec.nbytes) for spec in some), default=0) for some in taking_turns]
    for spec in layout.buckets:
        start = ends.get(spec.device, 0) if turns is None else sum(sizes[: spec.index % turns])
        places.append(start)
        if not spec.sparse:
            ends[spec.device] = max(ends.get(spec.device, 0), start + _whole_lines(spec.nbytes))
    pieces = {device: _piece(nbytes, device, layout, transport) for device, nbytes in ends.items()}
    return [
        None if spec.sparse else pieces[spec.device][start : start + spec.nbytes].view(spec.dtype)
        for spec, start in zip(layout.buckets, places, strict=True)
    ]


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _piece(nbytes: int, device: torch.device, layout: Layout, transport: Transport) -> torch.Tensor:
    try:
        return transport.allocate(nbytes, torch.uint8, device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise BucketsTooLarge(
            f"rank {transport.rank} could not allocate {nbytes:,} bytes on {device} for the gradients of "
            f"{len(layout.params)} parameters in {len(layout.buckets)} buckets: {error}; use a smaller model, freeze "
            f"parameters, or free memory before wrapping"
        ) from error
