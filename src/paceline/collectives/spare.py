"""Memory that is used again: what is new every time costs its first touch, and the C library may keep it."""

from typing import Any

import torch
from torch.distributed.distributed_c10d import AllToAllOptions

from paceline.collectives.api import Work

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
        return found if found is not None and found.numel() >= count else torch.empty(count, dtype=dtype, device="cpu")

    def give_back(self, memory: torch.Tensor) -> None:
        free = self._free.setdefault(memory.dtype, [])
        if memory.nbytes + sum(other.nbytes for other in free) <= MOST_BYTES:
            free.append(memory)

    def __reduce__(self) -> tuple[type["SpareMemory"], tuple[()]]:
        return type(self), ()


class BorrowingWork:
    """A collective that reads from spare memory until it is complete."""

    def __init__(self, work: Work, spare: SpareMemory, memory: torch.Tensor) -> None:
        self._work = work
        self._spare = spare
        self._memory: torch.Tensor | None = memory

    def done(self) -> bool:
        return self._work.done()

    def wait(self, seconds: float) -> bool:
        if not self._work.wait(seconds):
            return False
        if self._memory is not None:
            self._spare.give_back(self._memory)
            self._memory = None
        return True


def gather_on_host(group: Any, out: torch.Tensor, part: torch.Tensor, spare: SpareMemory) -> tuple[Any, torch.Tensor]:
    """gloo's work that fills `out` with the parts of all ranks, and the memory that it reads from.

    Every rank sends its part to every other. gloo's own all_gather takes twice as long, at all sizes: it fills new
    memory and copies that, on a thread whose heap keeps it.
    """
    memory = spare.take(out.numel(), part.dtype)
    copies = memory[: out.numel()]
    copies.view(group.size(), -1).copy_(part)  # a part may be empty
    return group.alltoall_base(out, copies, [], [], AllToAllOptions()), memory
