"""One 64-bit word of many tensors, at the speed of memory: equal bits give equal words on all ranks.

How it is made
--------------
The bytes of a tensor are read as 64-bit integers and added up in rows of 127, wrapping around. The sums of rows, and
what fills no row, are stirred and multiplied, each by an odd number of its own, and added in turn. An odd factor loses
nothing modulo 2**64, and neither does stirring, so one changed bit always changes the word. It does not follow from
the order of additions, so the number of threads does not matter. Changes in several places are missed only where they
cancel out: within one row of 1016 bytes, or by a chance of 2**-32 or less.

Rows have an odd length, because the top bit of a sum only tells whether an odd number of top bits changed: if float64
were added in rows of even length, a tensor of flipped signs would look like the tensor itself.

Small tensors are strung together first, since a call costs more than their bytes. Several of them may lie in one row,
so each place of a row has a factor too.
"""

import hashlib
from collections.abc import Sequence
from functools import cache

import torch

from paceline.errors import UsageError

ROW = 127
SMALL_BYTES = 32768
TABLE = 16384
_LOW_HALF = 0xFFFFFFFF
_MASK = 0xFFFFFFFFFFFFFFFF


def word_of(tensors: Sequence[torch.Tensor]) -> int:
    """The word of `tensors`, in their order: a signed 64-bit integer.

    It depends on bits, sizes and order, not on strides: a tensor and its contiguous copy have the same word. Tensors
    on a device are waited for.
    """
    return start_word(tensors).word()


class StartedWord:
    """A word on its way. On a CUDA device it is computed on the stream that was current, and nothing waits for it."""

    def __init__(self, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        told = hashlib.blake2b(repr(sizes).encode(), digest_size=8).digest()
        self._sizes = int.from_bytes(told, "little")
        self._parts = list(parts)

    def word(self) -> int:
        """The word. Waits for the device, if there is one."""
        found = self._sizes
        for part in self._parts:
            found = _stir(found * 0x9E3779B97F4A7C15 + int(part))
        return found - (1 << 64) if found >> 63 else found

    def on_device(self) -> torch.Tensor | int:
        """A number that is equal for equal words of tensors of the same sizes, where it was computed."""
        return self._parts[0] if len(self._parts) == 1 else self.word()


def start_word(tensors: Sequence[torch.Tensor]) -> StartedWord:
    """Begin the word of `tensors`; on the CPU it is then complete. The host never waits for a CUDA device here."""
    sizes: list[int] = []
    places: dict[torch.device, _Place] = {}
    with torch.no_grad():
        for tensor in tensors:
            place = places.get(tensor.device)
            if place is None:
                place = places[tensor.device] = _Place(tensor.device)
            sizes.append(place.add(tensor))
        return StartedWord(sizes, [place.digest() for place in places.values()])


class _Place:
    """The tensors of one device, by size: large ones as rows at once, small ones by dtype until all have come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: list[torch.Tensor] = []
        self._small: dict[torch.dtype, list[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor; returns its size in bytes."""
        if not readable(tensor):
            raise UsageError(
                f"expected a dense tensor, got one of layout {tensor.layout} and dtype {tensor.dtype} on "
                f"{tensor.device}; leave it out of what is compared"
            )
        dtype, size = tensor.dtype, tensor.nbytes
        if size < SMALL_BYTES:
            if size:
                self._small.setdefault(dtype, []).append(tensor)
            return size
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)
        if rest := size % 8:
            rest //= dtype.itemsize
            self._small.setdefault(dtype, []).append(flat[-rest:])
            flat = flat[:-rest]
        if flat.storage_offset() * dtype.itemsize % 8:
            flat = flat.clone()  # it cannot be read as wider integers where it begins
        self._sums += _rows(flat.view(torch.int64))
        return size

    def digest(self) -> torch.Tensor:
        """All that was taken, as one integer on the device."""
        for dtype, tensors in self._small.items():
            size = sum(tensor.nbytes for tensor in tensors)
            # Never empty: a single tensor would come back as it is, aligned or not.
            filling = torch.zeros(max(1, (8 - size % 8) // dtype.itemsize), dtype=dtype, device=self._device)
            flat = torch._C._nn.flatten_dense_tensors([*tensors, filling])
            self._sums += _rows(flat.view(torch.int64), _factors(self._device))
        if not self._sums:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        return _melt(torch.cat(self._sums))


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory whose bits can be compared."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return plain and not hasattr(tensor, "to_local")


def _rows(words: torch.Tensor, factors: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The sums of all rows, and what is left. With `factors`, the places of a row are told apart."""
    count = words.numel() // ROW
    if not count:
        return [words]
    begin = words.storage_offset()
    rows = words.as_strided((count, ROW), (ROW, 1), begin)
    rest = words.as_strided((words.numel() - count * ROW,), (1,), begin + count * ROW)
    return [(rows if factors is None else rows * factors[:ROW]).sum(1), rest]


def _melt(words: torch.Tensor) -> torch.Tensor:
    """Any number of words as one."""
    factors = _factors(words.device)
    while True:
        # Stirred, so that top bits reach lower ones: sums alone would not tell two changed top bits from none.
        words = words ^ ((words >> 32) & _LOW_HALF)
        if words.numel() <= TABLE:
            return (words * factors[: words.numel()]).sum()
        words = torch.cat(_rows(words, factors))


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers, all different, the same on every rank."""
    values = [_stir((number + 1) * 0x9E3779B97F4A7C15) | 1 for number in range(TABLE)]
    return torch.tensor([v - (1 << 64) if v >> 63 else v for v in values], dtype=torch.int64, device=device)


def _stir(value: int) -> int:
    """A number below 2**64 as another one that shares no pattern with it (the end of splitmix64)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
