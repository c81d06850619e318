"""The life of every storage in one forward and backward, and its highest point. Pure functions on values, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

# What a storage is for. Plans by number and by following a model call it the same.
ACTIVATIONS, LOGITS, CASTS = "activations", "logits and loss", "weights in bfloat16"
TEMPORARIES, GRADIENTS = "temporaries of backward", "gradients"
# glibc's malloc maps larger blocks one by one and gives them back at once; smaller ones share a heap.
HEAP_BLOCK_BYTES = 32 * 2**20


class Event(Enum):
    """What happens to a storage."""

    BORN = auto()
    FREED = auto()
    TAKEN = auto()  # it is a whole gradient now: autograd has put it into `param.grad`


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in their order, each with the number of its storage."""

    sizes: tuple[int, ...]  # bytes of each storage
    kinds: tuple[str, ...]  # what each is for
    events: tuple[tuple[Event, int], ...]
    backward_from: int  # index of the first event of backward

    def same_course(self, other: "Timeline") -> bool:
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


def highest(timeline: Timeline, *, taken_leave: bool, grain: int = 1) -> Height:
    """The highest point.

    `taken_leave`: gradients leave when they are taken, because they are copied or added to memory that is there all
    the time. Storages are rounded up to multiples of `grain`, as the device's allocator does.
    """
    sizes = [-(-size // grain) * grain for size in timeline.sizes]
    top, top_index, height = 0, -1, 0
    gone: set[int] = set()
    for index, (event, storage) in enumerate(timeline.events):
        height += _change(event, storage, sizes, gone, taken_leave)
        if height > top:
            top, top_index = height, index
    return _at(timeline, sizes, top_index, taken_leave)


def _at(timeline: Timeline, sizes: Sequence[int], until: int, taken_leave: bool) -> Height:
    found: dict[str, int] = {}
    in_heap = 0
    gone: set[int] = set()
    for event, storage in timeline.events[: until + 1]:
        kind = timeline.kinds[storage]
        change = _change(event, storage, sizes, gone, taken_leave)
        found[kind] = found.get(kind, 0) + change
        in_heap += change if sizes[storage] < HEAP_BLOCK_BYTES else 0
    by_kind = tuple((kind, size) for kind, size in found.items() if size)
    return Height(until >= timeline.backward_from, by_kind, in_heap)


def _change(event: Event, storage: int, sizes: Sequence[int], gone: set[int], taken_leave: bool) -> int:
    if event is Event.BORN:
        return sizes[storage]
    if storage in gone or (event is Event.TAKEN and not taken_leave):
        return 0
    gone.add(storage)
    return -sizes[storage]


def between(first: Timeline, batch: int, second: Timeline, other_batch: int, wanted: int) -> Timeline:
    """The timeline at another batch size. Every storage is a constant plus so many bytes per sample."""
    assert first.same_course(second) and batch != other_batch
    sizes = []
    for size, other in zip(first.sizes, second.sizes, strict=True):
        sizes.append(max(0, size + (other - size) * (wanted - batch) // (other_batch - batch)))
    return replace(first, sizes=tuple(sizes))
