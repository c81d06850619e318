"""Sums whose order of additions is fixed: one binary tree over numbered parts.

The tree over n parts is the balanced one over the next power of two, with missing leaves left out. For n = 6:

            ┌───────┴───────┐
        ┌───┴───┐       ┌───┴
      ┌─┴─┐   ┌─┴─┐   ┌─┴─┐
      0   1   2   3   4   5

So the sum of an aligned block (a power of two of parts, beginning at a multiple of it) is a node of the tree, whichever
rank holds which parts, for any number of ranks: a rank that holds a block may add it up itself, and the bits stay
equal. Every node is rounded to the type of the parts. The payload of a NaN that results from two NaNs is not defined:
backends differ in it.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from paceline.blocks import Block
from paceline.errors import UsageError


def tree_additions(count: int) -> list[tuple[int, int]]:
    """The tree as additions in place: (into, other) adds part `other` to part `into`, and the sum ends in part 0.

    A partial sum is used as soon as possible, while it is still in the cache.
    """
    return list(_additions(0, _width(count), count))


def _additions(first: int, width: int, count: int) -> Iterator[tuple[int, int]]:
    half = width // 2
    if half:
        yield from _additions(first, half, count)
        if first + half < count:
            yield from _additions(first + half, half, count)
            yield first, first + half


def _width(count: int) -> int:
    """The number of leaves of the tree, including the missing ones."""
    return 1 << (count - 1).bit_length()


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the parts, in new memory, added in the order of the tree."""
    return tree_sum_of_blocks({(number, 1): part for number, part in enumerate(parts)}, len(parts))


def tree_sum_of_blocks(blocks: Mapping[Block, torch.Tensor], count: int) -> torch.Tensor:
    """The same from the sums of aligned blocks that together hold each of `count` parts once.

    Needs memory for one partial sum per level of the tree, at most.
    """
    total, owned = _sum(blocks, 0, _width(count), count)
    if total is None or sum(max(0, min(first + size, count) - first) for first, size in blocks) != count:
        raise UsageError(f"expected aligned blocks that hold each of {count} parts once, got {sorted(blocks)}")
    return total if owned else total.clone()


def _sum(blocks: Mapping[Block, torch.Tensor], first: int, width: int, count: int) -> tuple[torch.Tensor | None, bool]:
    """The sum of one node, None if all its leaves are missing, and whether its memory may be added into."""
    if first >= count:
        return None, False
    if (first, width) in blocks:
        return blocks[first, width], False
    if width == 1:
        raise UsageError(f"expected a block that holds part {first} of {count}, got {sorted(blocks)}")
    half = width // 2
    left, left_owned = _sum(blocks, first, half, count)
    right, right_owned = _sum(blocks, first + half, half, count)
    if left is None or right is None:
        return (left, left_owned) if right is None else (right, right_owned)
    if left_owned:
        return left.add_(right), True
    if right_owned:
        return torch.add(left, right, out=right), True
    return left + right, True
