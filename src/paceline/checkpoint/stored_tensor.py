"""Tensors that are still in the files of a snapshot, in the place of those that a decoded value will hold."""

import math
from collections import OrderedDict
from typing import Any, NamedTuple, TypeGuard

import torch

from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.stored.json_tree import decode_tensor
from paceline.stored.tensor_file import bytes_of
from paceline.stored.value_tree import MARK, dtype_of

SCRATCH_BYTES = 16 << 20  # where bytes cannot be read into a tensor's own memory


class _Piece(NamedTuple):
    """Bytes `begin` to `end` of a tensor, which are in a file at `offset`."""

    begin: int
    end: int
    file: str
    offset: int


class StoredTensor:
    """A tensor in the files of a snapshot. It is read once, into memory that is there, or that is made for it."""

    def __init__(
        self, opened: OpenSnapshot, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: list[_Piece]
    ) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._opened = opened
        self._pieces = sorted(pieces)
        self._taken: torch.Tensor | None = None
        at = 0
        for piece in self._pieces:
            if piece.begin != at:
                raise ValueError(f"bytes {at} to {piece.begin} of {name!r} are missing or there twice")
            at = piece.end
        if at != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} has {at} bytes, expected a {dtype} of shape {list(shape)}")

    def load(self, like: object = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor: `like` with its values, if that is one of this shape and type, else a new one."""
        if self._taken is None:
            target = like if self._fits(like) else torch.empty(self.shape, dtype=self.dtype, device=device)
            self.read(target)
            self._taken = target
        return self._taken

    def read(self, target: torch.Tensor, first: int = 0) -> None:
        """Fill `target` with the elements from `first` on."""
        target = torch.atleast_1d(target.detach())
        if target.device.type == "cpu" and target.is_contiguous():
            self._read_bytes(bytes_of(target), first * self.dtype.itemsize)
            return
        rows = max(1, SCRATCH_BYTES // max(1, target[:1].numel() * self.dtype.itemsize))
        for some in target.split(rows):
            scratch = torch.empty(some.shape, dtype=self.dtype, device="cpu")
            self._read_bytes(bytes_of(scratch), first * self.dtype.itemsize)
            some.copy_(scratch)
            first += some.numel()

    def _read_bytes(self, memory: memoryview, begin: int) -> None:
        for piece in self._pieces:
            low, high = max(piece.begin, begin), min(piece.end, begin + len(memory))
            if low < high:
                self._opened.read(piece.file, piece.offset + low - piece.begin, memory[low - begin : high - begin])

    def _fits(self, like: object) -> TypeGuard[torch.Tensor]:
        return (
            isinstance(like, torch.Tensor)
            and type(like) in (torch.Tensor, torch.nn.Parameter)
            and (like.shape, like.dtype, like.layout) == (self.shape, self.dtype, torch.strided)
            and not (like.is_meta or like.is_conj() or like.is_neg())
        )


class StoredTensors:
    """The tensors of one file, by name."""

    def __init__(self, opened: OpenSnapshot, file: str) -> None:
        """Raises ValueError if the file is not in the safetensors format, and KeyError if it does not exist."""
        self._opened = opened
        self._file = file
        self._start, self._entries = opened.entries(file)
        self._made: dict[str, StoredTensor] = {}

    def leaf(self, tree: dict[str, Any]) -> Any:
        """What stands for a leaf of a tree of values: equal names get the same tensor. Arrays are read at once."""
        name = tree["name"]
        if name not in self._made:
            entry = self._entries.get(name)
            if entry is None:
                raise ValueError(f"there is no tensor {name!r}")
            dtype = dtype_of(tree["dtype"]) if "dtype" in tree else entry.dtype
            shape = tuple(tree["shape"]) if "dtype" in tree else entry.shape
            piece = _Piece(0, entry.end - entry.begin, self._file, self._start + entry.begin)
            self._made[name] = StoredTensor(self._opened, name, dtype, shape, [piece])
        found = self._made[name]
        return found if tree[MARK] == "tensor" else decode_tensor({MARK: tree[MARK]}, found.load())


def fill(value: Any, like: Any = None) -> Any:
    """The value with its tensors read: into those that `like`, a value of the same form, has in their places, or into
    new ones on the CPU."""
    if isinstance(value, StoredTensor):
        return value.load(like)
    if type(value) in (dict, OrderedDict):
        known = like if isinstance(like, dict) else {}
        return type(value)((key, fill(item, known.get(key))) for key, item in value.items())
    if type(value) in (list, tuple):
        given = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(fill(item, other) for item, other in zip(value, given, strict=True))
    return value
