"""Which lanes a rank runs, and which nodes of the tree over lane numbers they cover. Needs no torch."""

from collections.abc import Iterator

Block = tuple[int, int]  # the first part, and the power of two of parts


def lanes_of(rank: int, size: int, lanes: int) -> range:
    """The lanes that one of `size` ranks runs. If the division leaves a remainder, the first ranks have one more."""
    first, end = (-(-lanes * before // size) for before in (rank, rank + 1))
    return range(first, end)


def listed(lanes: range) -> str:
    """`lane 3`, `lanes 2 to 5`."""
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]} to {lanes[-1]}"


def aligned_blocks(first: int, count: int) -> Iterator[Block]:
    """The smallest number of aligned blocks that cover the parts `first` to `first + count - 1`."""
    end = first + count
    while first < end:
        width = first & -first or 1 << count.bit_length()
        while first + width > end:
            width //= 2
        yield first, width
        first += width
