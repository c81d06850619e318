"""Reused memory of collectives."""

import torch

MOST_BYTES = 1 << 24  # kept at most, of one type


class SpareMemory:
    """Flat host memory that is reused: the first touch of new memory is slow, and the C library may not return it to
    the system.

    Memory that was taken is exclusive until it is given back. A collective that was never waited for does not give back
    memory that it may still write to.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for at least `count` numbers, uninitialized."""
        free = self._free.setdefault(dtype, [])
        found = free.pop() if free else None
        return found if found is not None and found.numel() >= count else torch.empty(count, dtype=dtype, device="cpu")

    def give_back(self, memory: torch.Tensor) -> None:
        free = self._free.setdefault(memory.dtype, [])
        if memory.nbytes + sum(other.nbytes for other in free) <= MOST_BYTES:
            free.append(memory)

    def __reduce__(self) -> tuple[type["SpareMemory"], tuple[()]]:
        return type(self), ()
