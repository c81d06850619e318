"""Whether all numbers are finite, and which are not."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

CHUNK = 1 << 22  # elements that are looked at in one go, where that takes memory
_SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class NotFinite(NamedTuple):
    """The first tensor with a number that is not finite, how many it has, and of which kind: "NaN", "Inf" or both."""

    name: str
    how_many: int
    kind: str


def all_finite(flat: torch.Tensor) -> bool:
    """Whether every number is finite. One pass over memory; on a device it is waited for.

    A NaN or an infinity in any place makes the sum one, so a sum that is finite proves it. One that is not may have
    overflowed: then the smallest and the largest number tell, of which a NaN anywhere makes NaNs.
    """
    numbers = _numbers(flat)
    if numbers is None:
        return True
    pieces = [numbers] if numbers.dtype in _SUMMED else _chunks(numbers)
    return all(_is_finite(piece.sum()) or all(map(_is_finite, torch.aminmax(piece))) for piece in pieces)


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> NotFinite | None:
    """The first tensor that is not finite. None if all are. For use after something was found: it takes its time."""
    for name, tensor in named:
        if all_finite(tensor):
            continue
        numbers = _numbers(tensor)
        chunks = [] if numbers is None else list(_chunks(numbers))
        nans = sum(int(torch.isnan(chunk).sum()) for chunk in chunks)
        infinities = sum(int(torch.isinf(chunk).sum()) for chunk in chunks)
        kind = "NaN and Inf" if nans and infinities else "NaN" if nans else "Inf"
        return NotFinite(name, nans + infinities, kind)
    return None


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The floating point numbers of a tensor; None if it has none."""
    tensor = tensor.detach()
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel():
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor


def _is_finite(number: torch.Tensor) -> bool:
    return math.isfinite(float(number))


def _chunks(numbers: torch.Tensor) -> Iterable[torch.Tensor]:
    """Pieces of bounded size, in a dtype that can be asked."""
    for chunk in numbers.reshape(-1).split(CHUNK):
        yield chunk if chunk.dtype in _SUMMED else chunk.to(torch.float32)
