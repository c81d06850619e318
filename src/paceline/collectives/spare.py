"""Memory that is used again: what is new every time costs its first touch, and the C library may keep it."""

import torch

MOST_BYTES = 1 << 24  # kept at most, of one type


class SpareMemory:
    """Flat memory on the host. Whoever takes some is alone with it until it is given back, or for good.

    A collective that was never waited for to its end does not give back what it may still write to.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for at least `count` numbers, with anything in it."""
        free = self._free.setdefault(dtype, [])
        found = free.pop() if free else None
        return found if found is not None and found.numel() >= count else torch.empty(count, dtype=dtype)

    def give_back(self, memory: torch.Tensor) -> None:
        free = self._free.setdefault(memory.dtype, [])
        if memory.nbytes + sum(other.nbytes for other in free) <= MOST_BYTES:
            free.append(memory)

    def __reduce__(self) -> tuple[type["SpareMemory"], tuple[()]]:
        return type(self), ()
