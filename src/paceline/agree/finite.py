"""Whether all numbers are finite, and which are not."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

CHUNK = 1 << 22  # elements that are looked at in one go; `torch.dot` takes 2^31 at most
OWN, SUM = 1, 2  # not finite: the gradients of this rank, or only the sum over all ranks
_KNOWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The floating point numbers of a tensor, flat and real. None if it has none."""
    tensor = tensor.detach()
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()  # coalescing would need a sort
    if not tensor.numel():
        return None
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.reshape(-1)
    return tensor if tensor.dtype in _KNOWN else tensor.to(torch.float32)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite, in one pass over memory. On a device it is waited for.

    A number that is not finite makes the sum not finite, so a finite sum is proof. If the sum is not finite, it may
    have overflowed: then the smallest and the largest number decide, which are NaN if any number is.
    """
    numbers = numbers_of(tensor)
    if numbers is None or math.isfinite(numbers.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(numbers))


class FiniteCheck:
    """Checks on one rank whether its gradients and the reduced ones are finite.

    Which sums are checked
    ------------------------
    A sum of finite numbers that is not finite has overflowed. For that, some rank must hold a number of at least the
    largest representable one, divided by the number of ranks. So each rank checks its own numbers, in one pass, and the
    sum only if one of them is that large or if the reduction does more than add. What one rank finds it reports to all.
    """

    def __init__(self, adds: int) -> None:
        """`adds`: how many tensors are added up."""
        self._adds = adds
        self._found = 0
        self._large = False
        self._largest: list[torch.Tensor] = []  # magnitudes that are still on the device

    def look_at_own(self, parts: Iterable[torch.Tensor]) -> None:
        """These gradients of this rank are about to be reduced."""
        for part in parts:
            numbers = numbers_of(part)
            if numbers is None:
                continue
            if numbers.is_cuda:
                self._largest.append(torch.linalg.vector_norm(numbers, math.inf))
                continue
            small = torch.finfo(numbers.dtype).max / (2 * self._adds)  # half of it: partial sums are rounded
            if not _all_below(numbers, small):
                low, high = (end.item() for end in torch.aminmax(numbers))
                self._found |= 0 if math.isfinite(low) and math.isfinite(high) else OWN
                self._large |= max(-low, high) >= small

    def look_at_sums(self, sums: Sequence[torch.Tensor], *, only_added: bool) -> None:
        """These are the reduced gradients. `only_added`: the reduction only added and divided."""
        if (self._large or not only_added) and not all(map(all_finite, sums)):
            self._found |= SUM

    def taken(self) -> int:
        """What was found not to be finite since the last call."""
        found, self._found, self._large = self._found, 0, False
        return found

    def taken_on_device(self) -> int | torch.Tensor:
        """The same on the device: `OWN` or 0, without making the host wait."""
        largest, self._largest = self._largest, []
        return torch.stack(largest).isfinite().all().logical_not() * OWN if largest else 0


def _all_below(numbers: torch.Tensor, small: float) -> bool:
    """Whether the sum of squares, one quick pass, proves that all numbers are below `small`, and so finite."""
    return all(torch.dot(chunk, chunk).item() < small * small for chunk in numbers.split(CHUNK))


class NotFinite(NamedTuple):
    """The first tensor with a number that is not finite, how many it has, and of which kind: "NaN", "Inf" or both."""

    name: str
    how_many: int
    kind: str


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> NotFinite | None:
    """The first tensor that is not finite. None if all are. Slow; for use after something was found."""
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
