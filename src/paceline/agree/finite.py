"""Whether all numbers are finite, and which are not."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from paceline.collectives.finite import all_finite, numbers_of

CHUNK = 1 << 22  # elements that are looked at in one go, where that takes memory


class NotFinite(NamedTuple):
    """The first tensor with a number that is not finite, how many it has, and of which kind: "NaN", "Inf" or both."""

    name: str
    how_many: int
    kind: str


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> NotFinite | None:
    """The first tensor that is not finite. None if all are. For use after something was found: it takes its time."""
    for name, tensor in named:
        if all_finite(tensor):
            continue
        numbers = numbers_of(tensor)
        chunks = () if numbers is None else numbers.split(CHUNK)
        nans = sum(int(torch.isnan(chunk).sum()) for chunk in chunks)
        infinities = sum(int(torch.isinf(chunk).sum()) for chunk in chunks)
        kind = "NaN and Inf" if nans and infinities else "NaN" if nans else "Inf"
        return NotFinite(name, nans + infinities, kind)
    return None
