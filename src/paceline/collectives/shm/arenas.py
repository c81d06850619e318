"""The memory that this rank shares with the others: arenas, and a pool of them for tensors that live elsewhere."""

import ctypes
import itertools
from bisect import bisect_left, insort
from collections import Counter, deque

import torch

from paceline.collectives.shm import memfd
from paceline.collectives.shm.memfd import Descriptor

KEPT_AT_MOST = 64 << 20  # bytes of one arena of the pool
ALL_KEPT_AT_MOST = 256 << 20
ROUNDED_UP = 1 << 20  # up to here sizes are rounded up to powers of two, beyond to multiples of it
NOWHERE = -1  # in place of an arena: nothing to read


class Arena:
    """One piece of memory of this rank. `bytes` does not keep it mapped; the tensor that the user got does."""

    __slots__ = ("bytes", "descriptor", "number")

    def __init__(self, number: int, descriptor: Descriptor, loose: torch.Tensor) -> None:
        self.number = number
        self.descriptor: Descriptor | None = descriptor  # until the peers have it
        self.bytes = loose


class Arenas:
    """All arenas of one rank, found by the address where they begin."""

    def __init__(self) -> None:
        self._by_address: dict[int, Arena] = {}
        self._by_number: dict[int, Arena] = {}
        self._numbers = itertools.count()
        self.freed: deque[int] = deque()  # arenas whose memory is gone, and the peers were not told yet

    def allocate(self, nbytes: int, what: str) -> torch.Tensor:
        """Zeroed bytes. They are released with the last tensor that views them."""
        size = -(-nbytes // memfd.PAGE) * memfd.PAGE
        descriptor = memfd.create(size, what)
        number = next(self._numbers)

        def freed() -> None:
            # May run in any thread at any time: each line is atomic in the interpreter.
            self._by_address.pop(address, None)
            gone = self._by_number.pop(number, None)
            if gone is not None and gone.descriptor is None:
                self.freed.append(number)

        buffer = memfd.map_shared(descriptor, size, populate=True, freed=freed)
        address = ctypes.addressof(buffer)
        self._by_number[number] = Arena(number, descriptor, memfd.loose_tensor_of(buffer))
        self._by_address[address] = self._by_number[number]
        return memfd.tensor_of(buffer)[:nbytes]

    def find(self, flat: torch.Tensor) -> tuple[Arena, int] | None:
        """The arena that holds a tensor, and the offset in it, in bytes."""
        address = flat.untyped_storage().data_ptr()
        arena = self._by_address.get(address)
        return None if arena is None else (arena, flat.data_ptr() - address)

    def arena(self, number: int) -> Arena:
        return self._by_number[number]


class ArenaPool:
    """Arenas that are lent to one collective after another.

    A large one is kept only once its size has been requested again: most sizes at the start never recur.
    """

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._free: list[torch.Tensor] = []  # by size
        self._asked: Counter[int] = Counter()  # how often, by powers of two

    def take(self, nbytes: int) -> torch.Tensor:
        size = max(memfd.PAGE, 1 << (nbytes - 1).bit_length())
        self._asked[size] += 1
        if size > ROUNDED_UP:
            size = -(-nbytes // ROUNDED_UP) * ROUNDED_UP
        at = bisect_left(self._free, size, key=torch.Tensor.numel)
        if at < len(self._free) and self._free[at].numel() <= 2 * size:
            return self._free.pop(at)
        if at and 2 * self._free[at - 1].numel() >= size and self._comes_back(size):
            del self._free[at - 1]  # the larger one will do in its place
        return self._arenas.allocate(size, "a tensor that does not live in shared memory")

    def give(self, block: torch.Tensor) -> None:
        size = block.numel()
        if self._comes_back(size) and self.kept + size <= ALL_KEPT_AT_MOST:
            insort(self._free, block, key=torch.Tensor.numel)

    def _comes_back(self, size: int) -> bool:
        return size <= ROUNDED_UP or (size <= KEPT_AT_MOST and self._asked[1 << (size - 1).bit_length()] > 1)

    @property
    def kept(self) -> int:
        """Bytes that are not in use."""
        return sum(block.numel() for block in self._free)

    def clear(self) -> None:
        self._free.clear()
