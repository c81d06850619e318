"""A piece of a named tensor: what is compared, located and healed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements `begin` to `end` of a tensor, counted in row-major order whatever its strides are."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Piece":
        return cls(name, tensor, 0, tensor.numel())

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def signature(self) -> list[object]:
        """What must be equal on all ranks before bits can be compared."""
        return [self.name, list(self.tensor.shape), str(self.tensor.dtype), self.begin, self.end]

    def flat(self) -> torch.Tensor:
        """The elements as one contiguous tensor. It shares memory with the tensor if that is contiguous."""
        tensor = self.tensor.detach()
        if tensor.is_contiguous():
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset() + self.begin)
        rows, before = self._rows(tensor)
        return rows.reshape(-1)[before : before + self.numel]

    def write(self, flat: torch.Tensor) -> None:
        """Overwrite the elements, bit for bit."""
        with torch.no_grad():
            tensor = self.tensor.detach()
            if tensor.is_contiguous():
                _as_bits(tensor.view(-1)[self.begin : self.end]).copy_(_as_bits(flat))
                return
            rows, before = self._rows(tensor)
            new = rows.clone(memory_format=torch.contiguous_format)
            new.view(-1)[before : before + self.numel] = flat
            _as_bits(rows).copy_(_as_bits(new))

    def index(self, at: int) -> tuple[int, ...]:
        """Where the element `at` of this piece is in the whole tensor."""
        return unravel(self.begin + at, self.tensor.shape)

    def _rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The fewest leading rows that hold the elements, and how many of theirs come before."""
        width = math.prod(tensor.shape[1:])
        if not self.numel:
            return tensor[:0], 0
        first, last = self.begin // width, -(-self.end // width)
        return tensor[first:last], self.begin - first * width


def unravel(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The row-major place `at` as an index."""
    index = []
    for length in reversed(shape):
        at, here = divmod(at, length)
        index.append(here)
    return tuple(reversed(index))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies of floating point numbers need not keep the bits of a NaN."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])
