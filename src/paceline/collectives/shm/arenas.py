"""The memory that this rank lets the others write to: arenas, and a pool of them for tensors that live elsewhere."""

import ctypes
import itertools
from collections import deque

import torch

from paceline.collectives.shm import memfd
from paceline.collectives.shm.memfd import Descriptor

KEPT_AT_MOST = 64 << 20  # bytes of one arena of the pool
ALL_KEPT_AT_MOST = 256 << 20
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
        """Zeroed bytes. They are given back when the last tensor that looks at them is gone."""
        size = -(-nbytes // memfd.PAGE) * memfd.PAGE
        descriptor = memfd.create(size, what)
        number = next(self._numbers)

        def freed() -> None:
            # May run in any thread, at any moment: each line is one step of the interpreter.
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
        """The arena that a tensor lives in, and where in it, in bytes."""
        address = flat.untyped_storage().data_ptr()
        arena = self._by_address.get(address)
        return None if arena is None else (arena, flat.data_ptr() - address)

    def arena(self, number: int) -> Arena:
        return self._by_number[number]


class ArenaPool:
    """Arenas that are lent to one collective after another, by powers of two."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._free: dict[int, list[torch.Tensor]] = {}
        self._kept = 0

    def take(self, nbytes: int) -> torch.Tensor:
        size = max(memfd.PAGE, 1 << (nbytes - 1).bit_length())
        free = self._free.get(size)
        if not free:
            return self._arenas.allocate(size, "a tensor that does not live in shared memory")
        self._kept -= size
        return free.pop()

    def give(self, block: torch.Tensor) -> None:
        size = block.numel()
        if size <= KEPT_AT_MOST and self._kept + size <= ALL_KEPT_AT_MOST:
            self._kept += size
            self._free.setdefault(size, []).append(block)

    def clear(self) -> None:
        self._free.clear()
        self._kept = 0
