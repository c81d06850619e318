"""Which parameters took part in a reduction, as reported between ranks."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from paceline.reducer.bucket import GradSlot

if TYPE_CHECKING:
    from paceline.reducer.report import StepReport

BITS = 62  # one for each parameter, in one column of a report


def used_bits(slots: Sequence[GradSlot]) -> tuple[int, ...]:
    """Which of the parameters took part."""
    found = [0] * -(-len(slots) // BITS)
    for index, slot in enumerate(slots):
        if slot.used:
            found[index // BITS] |= 1 << index % BITS
    return tuple(found)


@cache  # called in every step with the same count
def all_used(count: int) -> tuple[int, ...]:
    """The same, if all of `count` parameters took part."""
    whole, rest = divmod(count, BITS)
    return ((1 << BITS) - 1,) * whole + (((1 << rest) - 1,) if rest else ())


def count_uses(reports: Sequence["StepReport"], count: int) -> list[int]:
    """The number of ranks on which each of `count` parameters took part."""
    return [sum(row.used[index // BITS] >> index % BITS & 1 for row in reports) for index in range(count)]


def count_unused(slots: Sequence[GradSlot]) -> int:
    """The number of parameters that took no part here."""
    return sum(not (slot.used or slot.owned_elsewhere) for slot in slots)


def digest_owned_elsewhere(slots: Sequence[GradSlot]) -> int:
    """A digest of the parameters that another replica reduces; 0 if there are none."""
    found = tuple(slot.index for slot in slots if slot.owned_elsewhere)
    return hash(found) if found else 0
