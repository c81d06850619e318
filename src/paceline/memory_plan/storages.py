"""The life of every storage in one forward and backward, and its highest point. Pure functions on values, no torch."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate

# What a storage is for. Plans by number and by following a model call it the same.
ACTIVATIONS, LOGITS, CASTS = "activations", "logits and loss", "weights in bfloat16"
TEMPORARIES, GRADIENTS = "temporaries of backward", "gradients"
# glibc's malloc maps larger blocks one by one and gives them back at once; smaller ones share a heap.
HEAP_BLOCK_BYTES = 32 * 2**20


class StorageEvent(Enum):
    """What happens to a storage."""

    BORN = auto()
    FREED = auto()
    TAKEN = auto()  # it is a complete gradient now: autograd has put it into `param.grad`


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in their order, each with the number of its storage."""

    sizes: tuple[int, ...]  # bytes of each storage
    kinds: tuple[str, ...]  # what each is for
    events: tuple[tuple[StorageEvent, int], ...]
    backward_from: int  # index of the first event of backward

    def same_events(self, other: "Timeline") -> bool:
        """Whether the same things happen in the same order, whatever their sizes."""
        return (self.kinds, self.events) == (other.kinds, other.events)


@dataclass(frozen=True, slots=True)
class Height:
    """Bytes at one moment, by kind."""

    in_backward: bool
    by_kind: tuple[tuple[str, int], ...]
    in_heap: int = 0  # of them, bytes in blocks that malloc takes from its heap

    @property
    def total(self) -> int:
        return sum(nbytes for _, nbytes in self.by_kind)


def highest(timeline: Timeline, *, grads_are_copied: bool, granularity: int = 1) -> Height:
    """The highest point.

    `grads_are_copied`: a gradient is freed when it is complete, because it is copied into, or added to, memory that is
    there all the time. Storages are rounded up to multiples of `granularity`, as the device's allocator does.
    """
    sizes = [-(-size // granularity) * granularity for size in timeline.sizes]
    changes = []
    freed: set[int] = set()
    for event, storage in timeline.events:
        if event is StorageEvent.BORN:
            changes.append(sizes[storage])
        elif storage in freed or (event is StorageEvent.TAKEN and not grads_are_copied):
            changes.append(0)
        else:
            freed.add(storage)
            changes.append(-sizes[storage])
    heights = [0, *accumulate(changes)]
    until = heights.index(max(heights))
    by_kind: dict[str, int] = {}
    in_heap = 0
    for (_, storage), change in zip(timeline.events[:until], changes, strict=False):
        kind = timeline.kinds[storage]
        by_kind[kind] = by_kind.get(kind, 0) + change
        in_heap += change if sizes[storage] < HEAP_BLOCK_BYTES else 0
    present = tuple((kind, size) for kind, size in by_kind.items() if size)
    return Height(until > timeline.backward_from, present, in_heap)


def between(first: Timeline, batch: int, second: Timeline, other_batch: int, wanted: int) -> Timeline:
    """The timeline at another batch size. Every storage is a constant plus so many bytes per sample."""
    assert first.same_events(second) and batch != other_batch
    sizes = []
    for size, other in zip(first.sizes, second.sizes, strict=True):
        sizes.append(max(0, size + (other - size) * (wanted - batch) // (other_batch - batch)))
    return replace(first, sizes=tuple(sizes))
