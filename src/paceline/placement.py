"""Which rank owns what under a sharded placement, as one frozen value.

A parameter is cut into blocks, one per rank, in its own coordinates: element 0 to numel, in the order of its memory.
The cut follows from shapes and the number of ranks alone, so it is fixed for the life of a run. How gradients are cut
into buckets (`layout.py`) is independent of it, and may change between steps without moving anything that a rank owns.

    w  ├── rank 0 ──┼── rank 1 ──┼─ rank 2 ─┤        b  ├ rank 1 ┤        small ones have one owner
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.layout import BucketSpec, ParamMeta

# Below this a parameter has one owner: a block of it would cost more to address than to reduce.
SMALL_BYTES = 16 * 1024
# Blocks are multiples of this many elements, so they are whole cache lines for any number of ranks.
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


def placement_of(name: object, shard: object = None, copies: object = None) -> Placement:
    """The placement with this name. Shards over one rank amount to "ddp"."""
    if name not in PLACEMENTS:
        accepted = ", ".join(map(repr, PLACEMENTS))
        raise UsageError(f"placement={name!r} is not known; accepted: {accepted}")
    for what, value in (("shard", shard), ("copies", copies)):
        if name == "ddp" and value not in (None, 1):
            raise UsageError(f'{what}={value!r} needs shards; pass placement="zero1", "zero2" or "zero3" with it')
    if shard is not None and copies is not None:
        raise UsageError(
            f"shard={shard!r} and copies={copies!r} set the same thing: over how many ranks shards are "
            f"made, and how many ranks hold each; pass one of them"
        )
    return PLACEMENTS["ddp" if shard == 1 else str(name)]


def shard_size(shard: object, world: int, copies: object = None) -> int:
    """Over how many consecutive ranks shards are made; None: over all, or so that `copies` ranks hold each."""
    what, value = ("shard", shard) if copies is None else ("copies", copies)
    if value is None:
        return world
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{what}={value!r} is not a number of ranks; expected a whole number of at least 1, or None")
    if world % value:
        possible = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
        raise UsageError(
            f"{what}={value} does not divide the world of {world} ranks, so some shards would have no twin; "
            f"expected one of {possible}"
        )
    return value if copies is None else world // value


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which block of every parameter each of `ranks` consecutive ranks owns. A block may be empty.

    Where the world is larger, the next ranks own the same blocks again: ranks that are `ranks` apart are twins.
    """

    ranks: int
    cuts: tuple[tuple[int, ...], ...]  # per parameter: where the blocks begin, and the end; one more than ranks

    def block(self, param: int, rank: int) -> Span:
        """The block of parameter `param` that `rank` owns."""
        position = rank % self.ranks
        return self.cuts[param][position], self.cuts[param][position + 1]

    def elements(self, rank: int) -> int:
        """How many elements `rank` owns of all parameters."""
        position = rank % self.ranks
        return sum(cuts[position + 1] - cuts[position] for cuts in self.cuts)

    def whole_among(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have every shard between them, so that the state can be put together without others."""
        found = {rank % self.ranks for rank in ranks}
        return bool(found) and all(position in found or not self.elements(position) for position in range(self.ranks))

    def spans(self, bucket: BucketSpec) -> tuple[tuple[Span, ...], ...]:
        """For each of `ranks` ranks, where in the bucket the gradients of its blocks are."""
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
    """Cut every parameter into one block per rank. Blocks begin on a cache line, so that kernels see the same alignment
    as in the whole parameter and give the same bits, and on a multiple of `BLOCK_ELEMENTS`, so that the sums of these
    elements exist in every world. A small parameter goes to the rank that holds the least."""
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
    """The modules whose parameters are gathered and freed together: those chosen, given as modules or classes, or
    the repeated blocks of the model."""
    if chosen is None:
        return list(_repeated(module))
    classes = tuple(one for one in chosen if isinstance(one, type))
    given = {id(one) for one in chosen if isinstance(one, nn.Module)}
    if strange := [one for one in chosen if not isinstance(one, type | nn.Module)]:
        raise UsageError(f"units= takes modules of the model, or classes of them, got {strange[0]!r}")
    found = [one for one in module.modules() if one is not module and (isinstance(one, classes) or id(one) in given)]
    if lost := [one for one in chosen if id(one) in given - {id(one) for one in found}]:
        raise UsageError(f"units= names a {type(lost[0]).__name__} that is not part of the model")
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


def group_by_unit(
    units: Sequence[nn.Module], params: Sequence[nn.Parameter], module: nn.Module | None = None
) -> list[list[int]]:
    """For each unit, and last for the root, which of `params` it has. Of units inside each other the innermost has it;
    what others share belongs to the root, also where one of them is a part of `module` that is in no unit."""
    holders: dict[int, list[int]] = {}  # by parameter, the units that have it
    inside = [set(map(id, unit.modules())) for unit in units]
    in_units = set[int]().union(*inside)
    owners = () if module is None else (owner for owner in module.modules() if id(owner) not in in_units)
    of_root = {id(param) for owner in owners for param in owner._parameters.values()}
    for number, unit in enumerate(units):
        for param in set(unit.parameters()):
            holders.setdefault(id(param), []).append(number)
    found: list[list[int]] = [[] for _ in (*units, None)]
    for index, param in enumerate(params):
        numbers = [] if id(param) in of_root else holders.get(id(param), [])
        innermost = [n for n in numbers if all(id(units[n]) in inside[other] for other in numbers)]
        found[innermost[0] if innermost else -1].append(index)
    return found
