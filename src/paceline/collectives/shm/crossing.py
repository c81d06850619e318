"""The way of a collective between hosts, as the engine of one host sees it."""

from typing import Protocol

import torch

from paceline.collectives.api import Op

DIFFERENT = -1  # in place of a call: the ranks of this host have called different collectives


class Crossing(Protocol):
    """One all_reduce between hosts."""

    def send(self, part: torch.Tensor, op: Op) -> None:
        """Combine `part`, what this host has made of its slice, with those of the other hosts, in place."""
        ...

    def departed(self) -> bool:
        """Whether the part is on its way: once all hosts are known to do the same. Never blocks.

        Raises CollectiveMismatch, on all hosts, if they do not.
        """
        ...

    def arrived(self) -> bool:
        """Whether the part is what all hosts have made of it. Never blocks."""
        ...


class Between(Protocol):
    """What connects the hosts."""

    def announce(self, word: int, numel: int) -> Crossing | None:
        """Tell the other hosts which collective comes next here. None if this rank owns no slice."""
        ...
