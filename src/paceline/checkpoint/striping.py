"""Which rank writes which part of a snapshot: a function of what each rank holds and which ranks share a directory.

What only one rank holds, that rank writes. What several ranks hold they write together: the tensors they share are laid
end to end, and each rank writes an equal stretch. If directories are not shared, this is done for each of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.checkpoint.checkpoint_errors import CheckpointError

# A tensor is cut only if both parts are larger than this: many small pieces cost more than equal shares save.
SMALL_BYTES = 1 << 20
BLOCK_ELEMENTS = 256

Span = tuple[int, int]  # begin and end, in elements


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, and which of its elements each rank holds. `equal`: where several ranks hold the same elements, they
    have the same bits; otherwise the first of them in every directory writes its own."""

    name: str
    numel: int
    itemsize: int
    spans: Sequence[Span | None]  # by rank
    equal: bool
    can_be_cut: bool = True


@dataclass(frozen=True, slots=True)
class Stripe:
    """The elements `begin` to `end` of tensor `index`: the ranks that hold them, and those that write them, one per
    directory."""

    index: int
    begin: int
    end: int
    holders: tuple[int, ...]
    writers: tuple[int, ...]


def stripe(held: Sequence[Held], homes: Sequence[int]) -> list[Stripe]:
    """Deal out everything that is held. `homes`: for each rank, the lowest rank that sees the same directory.

    Raises CheckpointError if some elements are held by no rank.
    """
    by_holders: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for index, one in enumerate(held):
        for begin, end, holders in _atoms(one):
            if not one.equal:  # one for each directory
                holders = tuple({homes[rank]: rank for rank in reversed(holders)}.values())[::-1]
            by_holders.setdefault(holders, []).append((index, begin, end))
    return [piece for holders, run in by_holders.items() for piece in _deal(held, run, holders, homes)]


def _atoms(one: Held) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The tensor cut wherever the set of ranks that hold it changes."""
    if not one.numel:
        yield 0, 0, tuple(rank for rank, span in enumerate(one.spans) if span is not None)
        return
    borders = {0, one.numel, *(at for span in one.spans if span is not None for at in span)}
    for begin, end in pairwise(sorted(borders)):
        holders = tuple(
            rank for rank, span in enumerate(one.spans) if span is not None and span[0] <= begin and end <= span[1]
        )
        if not holders:
            raise CheckpointError(
                f"no rank holds the elements {begin} to {end} of {one.name!r}, so nothing was saved; save before ranks "
                f"leave the group"
            )
        yield begin, end, holders


def _deal(
    held: Sequence[Held], run: Sequence[tuple[int, int, int]], holders: tuple[int, ...], homes: Sequence[int]
) -> Iterator[Stripe]:
    """Cut a run of tensors held by the same ranks so that the ranks of every directory have equal shares."""
    teams: dict[int, list[int]] = {}
    for rank in holders:
        teams.setdefault(homes[rank], []).append(rank)
    ends = list(accumulate((end - begin) * held[index].itemsize for index, begin, end in run))
    total = ends[-1]
    shares = sorted({total * part // len(team) for team in teams.values() for part in range(1, len(team))})
    for (index, begin, end), high in zip(run, ends, strict=True):
        size = held[index].itemsize
        low = high - (end - begin) * size
        cuts = [begin]
        inside = shares[bisect_right(shares, low) : bisect_left(shares, high)]
        for share in inside if held[index].can_be_cut else ():
            at = begin + (share - low) // size // BLOCK_ELEMENTS * BLOCK_ELEMENTS
            if (at - cuts[-1]) * size >= SMALL_BYTES and (end - at) * size >= SMALL_BYTES:
                cuts.append(at)
        for first, last in pairwise([*cuts, end] if end > begin else [begin, end]):
            middle = low + ((first + last) // 2 - begin) * size
            writers = (team[min(middle * len(team) // max(total, 1), len(team) - 1)] for team in teams.values())
            yield Stripe(index, first, last, holders, tuple(writers))
