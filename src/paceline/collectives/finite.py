"""Numbers that are not finite, in what a rank sends and in what is made of it."""

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from paceline.collectives.api import Op

ADDING = (Op.SUM, Op.MEAN, Op.TREE)  # of these, what is not finite in one tensor is not finite in the result
CHUNK = 1 << 22  # elements; `torch.dot` takes 2^31 at most
MANY = 1024  # looks that wait for somebody to ask; the newer half may still wait for their sums
_KNOWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The floating point numbers of a tensor, flat and real. None if it has none."""
    tensor = tensor.detach()
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()  # not coalesced, which would take a sort
    if not tensor.numel():
        return None
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.reshape(-1)
    return tensor if tensor.dtype in _KNOWN else tensor.to(torch.float32)


def are_finite(numbers: torch.Tensor) -> bool:
    """Whether all of these are finite: what `numbers_of` gives, on the CPU, in one pass over memory.

    One that is not makes the sum not finite, so a sum that is proves it. One that is not may have overflowed: then the
    smallest and the largest tell, of which a NaN anywhere makes NaNs.
    """
    return math.isfinite(numbers.sum().item()) or all(math.isfinite(end.item()) for end in torch.aminmax(numbers))


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite. On a device it is waited for."""
    numbers = numbers_of(tensor)
    return numbers is None or are_finite(numbers)


def culprits(parts: Sequence[torch.Tensor], result: torch.Tensor) -> set[int]:
    """Which of the parts made their sum not finite. All of them if it has overflowed; none if it is finite."""
    if all_finite(result):
        return set()
    return {number for number, part in enumerate(parts) if not all_finite(part)} or set(range(len(parts)))


class Look:
    """What one tensor was like when it was sent, and what became of it: smallest and largest numbers."""

    def __init__(self, numbers: torch.Tensor, small: float) -> None:
        self._small = small
        self.before: tuple[torch.Tensor, torch.Tensor] = torch.aminmax(numbers)
        self.after: tuple[torch.Tensor, torch.Tensor] = self.before

    def at_result(self, tensor: torch.Tensor) -> None:
        """The sum is there, on the current stream."""
        numbers = numbers_of(tensor)
        if numbers is not None:
            low, high = torch.aminmax(numbers)
            there = self.before[0].device  # what was sent may have been a copy on a device
            self.after = (low.to(there), high.to(there))

    def blames(self, before: Sequence[float], after: Sequence[float]) -> bool:
        if not all(map(math.isfinite, before)):
            return True
        return max(map(abs, before)) >= self._small and not all(map(math.isfinite, after))


class Sent:
    """Whether the numbers that one rank sends are finite, where it cannot see those of the others.

    Who is to blame for a sum
    -------------------------
    A rank whose own numbers are finite, and that gets a sum which is not, cannot tell whether another rank's numbers
    were not finite or the sum has overflowed. But it can overflow only if a rank sent a number that is at least the
    largest one there is, divided by the number of ranks. Such a rank looks at the sum too, and is to blame if that is
    not finite. All others have nothing more to look at.

    On a device nothing is waited for until the answer is asked for, so there every sum is looked at.
    """

    def __init__(self) -> None:
        self.on = self._found = False
        self._looks: list[Look] = []
        self._unsummed: list[Look] = []

    def turn(self, on: bool) -> None:
        self.on = on
        if not on:
            self.taken()

    def look(self, tensor: torch.Tensor, adds: int = 1) -> Look | None:
        """Look at what is sent. `adds`: how many ranks' tensors are added up. The look that is returned, if one is,
        wants to see the sum."""
        numbers = numbers_of(tensor) if self.on else None
        if numbers is None:
            return None
        small = torch.finfo(numbers.dtype).max / (2 * adds)  # half of it: partial sums are rounded
        if numbers.device.type == "cpu" and _all_below(numbers, small):
            return None
        if len(self._looks) >= MANY:
            half = MANY // 2
            old, self._looks = self._looks[:half], self._looks[half:]
            self._found |= _any_to_blame(old)
        look = Look(numbers, small)
        self._looks.append(look)
        return look

    def exchanged(self, tensor: torch.Tensor, adds: int) -> None:
        """Look at what is sent for others to add up. Whoever adds shows the sum to `summed`."""
        look = self.look(tensor, adds)
        if look is not None and adds > 1:
            self._unsummed.append(look)

    def summed(self, tensor: torch.Tensor) -> None:
        """The sum of what was exchanged is there."""
        looks, self._unsummed = self._unsummed, []
        for look in looks:
            look.at_result(tensor)

    def taken(self) -> bool:
        """Whether any was found not to be finite since the last call."""
        found, looks = self._found, self._looks
        self._found, self._looks, self._unsummed = False, [], []
        return _any_to_blame(looks) or found


def _any_to_blame(looks: Sequence[Look]) -> bool:
    """The host waits here, once for each device."""
    found = False
    for _, near in groupby(sorted(looks, key=_device), key=_device):
        there = list(near)
        ends = torch.stack([end for look in there for end in (*look.before, *look.after)]).view(-1, 2, 2).tolist()
        found |= any(look.blames(*pair) for look, pair in zip(there, ends, strict=True))
    return found


def _device(look: Look) -> str:
    return str(look.before[0].device)


def _all_below(numbers: torch.Tensor, small: float) -> bool:
    """Whether all are proved to be smaller than that, and so finite, by the sum of their squares: one quick pass."""
    return all(torch.dot(chunk, chunk).item() < small * small for chunk in numbers.split(CHUNK))
