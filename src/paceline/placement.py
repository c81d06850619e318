"""Who owns what under a sharded placement, as one frozen value.

A parameter is cut into blocks, one per rank, in its own coordinates: element 0 to numel, in the order of its memory.
The cut follows from shapes and the number of ranks alone, so it is fixed for the life of a run. How gradients are cut
into buckets (`layout.py`) is another thing, and may change between steps without moving anything that a rank owns.

    w  ├── rank 0 ──┼── rank 1 ──┼─ rank 2 ─┤        b  ├ rank 1 ┤        small ones have one owner
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.layout import BucketSpec, ParamMeta

# Below this a parameter has one owner: a block of it would cost more to address than to reduce.
SMALL_BYTES = 16 * 1024
# Blocks are made of so many elements, and so of whole cache lines, whatever the number of ranks.
BLOCK_ELEMENTS = 256

Span = tuple[int, int]  # begin and end, in elements


@dataclass(frozen=True, slots=True)
class Placement:
    """What a rank keeps of optimizer state, gradients and parameters: all of it, or its shards."""

    name: str
    shards_optimizer: bool = False
    shards_gradients: bool = False
    shards_parameters: bool = False


PLACEMENTS = {
    placement.name: placement
    for placement in (
        Placement("ddp"),
        Placement("zero1", shards_optimizer=True),
        Placement("zero2", shards_optimizer=True, shards_gradients=True),
        Placement("zero3", shards_optimizer=True, shards_gradients=True, shards_parameters=True),
    )
}


def placement_of(name: object) -> Placement:
    """The placement with this name."""
    if name not in PLACEMENTS:
        accepted = ", ".join(map(repr, PLACEMENTS))
        raise UsageError(f"placement={name!r} is not known; accepted: {accepted}")
    return PLACEMENTS[str(name)]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which block of every parameter each of `ranks` ranks owns. A block may be empty."""

    ranks: int
    cuts: tuple[tuple[int, ...], ...]  # per parameter: where the blocks begin, and the end; one more than ranks

    def block(self, param: int, rank: int) -> Span:
        """The block of parameter `param` that `rank` owns."""
        return self.cuts[param][rank], self.cuts[param][rank + 1]

    def elements(self, rank: int) -> int:
        """How many elements `rank` owns of all parameters."""
        return sum(cuts[rank + 1] - cuts[rank] for cuts in self.cuts)

    def spans(self, bucket: BucketSpec) -> tuple[tuple[Span, ...], ...]:
        """For each rank, where in the bucket the gradients of its blocks are."""
        return tuple(
            _joined([self._placed(bucket, slot, rank) for slot in range(len(bucket.slots))])
            for rank in range(self.ranks)
        )

    def _placed(self, bucket: BucketSpec, slot: int, rank: int) -> Span:
        place = bucket.slots[slot]
        begin, end = self.block(place.param, rank)
        return place.offset + begin, place.offset + end


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same without empty ones, and with neighbours as one."""
    found: list[Span] = []
    for begin, end in spans:
        if found and found[-1][1] == begin and end > begin:
            found[-1] = (found[-1][0], end)
        elif end > begin:
            found.append((begin, end))
    return tuple(found)


def cut_parameters(params: Sequence[ParamMeta], ranks: int) -> Ownership:
    """Cut every parameter into one block per rank. Blocks begin on a cache line, so kernels see the same alignment as
    in the whole parameter, and their bits are the same; and on a multiple of `BLOCK_ELEMENTS`, so sums of these are
    there in every world. A small parameter goes to the rank that has the least."""
    held = [0] * ranks  # bytes
    cuts: list[tuple[int, ...]] = []
    for meta in params:
        if meta.nbytes < SMALL_BYTES:
            owner = held.index(min(held))
            borders = (*[0] * (owner + 1), *[meta.numel] * (ranks - owner))
        else:
            width = -(-meta.numel // (BLOCK_ELEMENTS * ranks)) * BLOCK_ELEMENTS
            borders = tuple(min(rank * width, meta.numel) for rank in range(ranks + 1))
        cuts.append(borders)
        for rank, (begin, end) in enumerate(pairwise(borders)):
            held[rank] += (end - begin) * meta.dtype.itemsize
    return Ownership(ranks, tuple(cuts))


def find_units(module: nn.Module, chosen: Sequence[Any] | None) -> list[nn.Module]:
    """The modules whose parameters are gathered and freed together: those chosen, as modules or as their classes, or
    the repeated blocks of the model."""
    if chosen is None:
        return list(_repeated(module))
    classes = tuple(one for one in chosen if isinstance(one, type))
    given = {id(one) for one in chosen if isinstance(one, nn.Module)}
    if strange := [one for one in chosen if not isinstance(one, type | nn.Module)]:
        raise UsageError(f"units= takes modules of the model, or classes of them, got {strange[0]!r}")
    found = [one for one in module.modules() if one is not module and (isinstance(one, classes) or id(one) in given)]
    if lost := [one for one in chosen if id(one) in given - {id(one) for one in found}]:
        raise UsageError(f"units= names a {type(lost[0]).__name__} that is no part of the model")
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost lists in which a class occurs more than once, as a model's layers do."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    counts = Counter(type(child) for child in children)
    for child in children:
        if isinstance(module, nn.ModuleList | nn.Sequential) and counts[type(child)] > 1:
            yield child
        else:
            yield from _repeated(child)


def group_by_unit(units: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> list[list[int]]:
    """For each unit, and last for the root, which of `params` it has. Of units inside each other the innermost has it;
    what others share belongs to the root."""
    holders: dict[int, list[int]] = {}  # by parameter, the units that have it
    inside = [set(map(id, unit.modules())) for unit in units]
    for number, unit in enumerate(units):
        for param in set(unit.parameters()):
            holders.setdefault(id(param), []).append(number)
    found: list[list[int]] = [[] for _ in (*units, None)]
    for index, param in enumerate(params):
        numbers = holders.get(id(param), [])
        innermost = [n for n in numbers if all(id(units[n]) in inside[other] for other in numbers)]
        found[innermost[0] if innermost else -1].append(index)
    return found
