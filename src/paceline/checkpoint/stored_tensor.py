"""Tensors that are still in the files of a snapshot, as placeholders in a decoded value."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from paceline.checkpoint.open_snapshot import Chunk, OpenSnapshot
from paceline.errors import Malformed
from paceline.stored.json_tree import decode_tensor
from paceline.stored.tensor_file import PARTS, TensorEntry, bytes_of, is_shape
from paceline.stored.tensor_part import Order, flat_of, in_order, order_of
from paceline.stored.value_tree import MARK, dtype_of
from paceline.typed_json import read_json, shown, typed

_SHAPE: Any = tuple[int, ...]
_PARTS: Any = dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]]
SCRATCH_BYTES = 16 << 20  # for reads that cannot go into a tensor's own memory


class _Piece(NamedTuple):
    """Bytes `begin` to `end` of a tensor, which are in a file at `offset`."""

    begin: int
    end: int
    file: str
    offset: int


class StoredTensor:
    """A tensor in the files of a snapshot. It is read once, into an existing tensor or a new one. What these functions
    read may be complete only when the OpenSnapshot has finished."""

    def __init__(
        self,
        opened: OpenSnapshot,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        order: Order,
        pieces: Sequence[_Piece],
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._opened = opened
        self._order = order
        self._pieces: list[_Piece] = []
        self._taken: torch.Tensor | None = None
        end = 0
        for piece in sorted(pieces):  # files copied from several hosts may hold the same bytes
            if piece.end > end or not self._pieces:
                self._pieces.append(piece)
                end = max(end, piece.end)
        if end > self.nbytes:
            raise ValueError(f"{name!r} has {end} bytes, expected a {dtype} of shape {list(shape)}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def missing(self, begin: int, end: int) -> tuple[int, int] | None:
        """The first of the elements from `begin` to `end` that are not in the files."""
        at, last = begin * self.dtype.itemsize, end * self.dtype.itemsize
        for piece in self._pieces:
            if piece.begin > at:
                break
            at = max(at, piece.end)
        following = next((piece.begin for piece in self._pieces if piece.begin > at), last)
        size = self.dtype.itemsize
        return (at // size, min(following, last) // size) if at < last else None

    def chunks(self, begin: int, end: int) -> Iterator[Chunk]:
        """The chunks of the files that hold the elements from `begin` to `end`."""
        size = self.dtype.itemsize
        for piece, low, high in self._overlaps(begin * size, end * size):
            start = piece.offset - piece.begin
            yield from self._opened.chunks_of(piece.file, start + low, start + high)

    def load(self, like: object = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor: read into `like` if that has its shape and dtype, else into a new one."""
        if self._taken is None:
            target = like if self._fits(like) else torch.empty(self.shape, dtype=self.dtype, device=device)
            self.read(target)
            self._taken = target
        return self._taken

    def finish(self) -> None:
        """Wait for all reads of this snapshot."""
        self._opened.finish()

    def read(self, target: torch.Tensor) -> None:
        """Fill `target`, a tensor of this shape."""
        target = target.detach()
        if order_of(target) == self._order:
            self._read_flat(flat_of(target), 0)
        elif self._order == tuple(range(target.dim())):  # a few rows at a time
            rows = max(1, SCRATCH_BYTES // max(1, target[:1].numel() * self.dtype.itemsize))
            first = 0
            for some in target.split(rows):
                scratch = torch.empty(some.shape, dtype=self.dtype, device="cpu")
                self._read_flat(scratch.view(-1), first)
                self.finish()
                some.copy_(scratch)
                first += some.numel()
        else:
            flat = torch.empty(target.numel(), dtype=self.dtype, device="cpu")
            self._read_flat(flat, 0)
            self.finish()
            target.copy_(in_order(flat, self.shape, self._order))

    def read_part(self, target: torch.Tensor, begin: int, form: torch.Tensor) -> None:
        """Fill `target`, which is flat, with the elements from `begin` on of the tensor, laid out like `form`."""
        if order_of(form) == self._order:
            self._read_flat(target.detach(), begin)
            return
        whole = torch.empty_strided(form.shape, form.stride(), dtype=self.dtype, device="cpu")
        self.read(whole)
        self.finish()
        target.detach().copy_(flat_of(whole)[begin : begin + target.numel()])

    def span_of(self, form: torch.Tensor, span: tuple[int, int]) -> tuple[int, int]:
        """The elements that `read_part` reads for a part of a tensor like `form`."""
        return span if order_of(form) == self._order else (0, self.shape.numel())

    def _read_flat(self, target: torch.Tensor, first: int) -> None:
        if target.device.type == "cpu" and target.dtype is self.dtype:
            begin, memory = first * self.dtype.itemsize, bytes_of(target)
            for piece, low, high in self._overlaps(begin, begin + len(memory)):
                offset = piece.offset + low - piece.begin
                self._opened.read_soon(piece.file, offset, memory[low - begin : high - begin])
            return
        for some in target.split(SCRATCH_BYTES // self.dtype.itemsize):
            scratch = torch.empty(some.shape, dtype=self.dtype, device="cpu")
            self._read_flat(scratch, first)
            self.finish()
            some.copy_(scratch)
            first += some.numel()

    def _overlaps(self, begin: int, end: int) -> Iterator[tuple[_Piece, int, int]]:
        for piece in self._pieces:
            low, high = max(piece.begin, begin), min(piece.end, end)
            if low < high:
                yield piece, low, high

    def _fits(self, like: object) -> TypeGuard[torch.Tensor]:
        return (
            isinstance(like, torch.Tensor)
            and type(like) in (torch.Tensor, torch.nn.Parameter)
            and (like.shape, like.dtype, like.layout) == (self.shape, self.dtype, torch.strided)
            and not (like.is_meta or like.is_conj() or like.is_neg())
        )


class StoredArray(NamedTuple):
    """A NumPy array or scalar that is still in a file."""

    kind: str
    stored: StoredTensor

    def load(self) -> Any:
        value = self.stored.load()
        self.stored.finish()
        return decode_tensor({MARK: self.kind}, value)


class _Described(NamedTuple):
    """A tensor as described by the headers of the files with its parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: Order
    pieces: list[_Piece]


def _check_part(entry: TensorEntry, first: int, shape: Sequence[int], order: Sequence[int]) -> None:
    """Raise Malformed unless the entry can be elements `first` and following of a tensor of this shape and order."""
    elements = (entry.end - entry.begin) // entry.dtype.itemsize
    fits = is_shape(shape, math.prod(shape)) and 0 <= first <= math.prod(shape) - elements
    if not fits or sorted(order) != list(range(len(shape))):
        raise Malformed(
            f"{elements} elements from {first} on in the order {shown(list(order))} are not part of a tensor of shape "
            f"{shown(list(shape))}"
        )


class StoredTensors:
    """The tensors of the files of one kind, by name."""

    def __init__(self, opened: OpenSnapshot, files: Sequence[str]) -> None:
        """Raises ValueError if a file is not in the safetensors format, or files do not fit together."""
        self._opened = opened
        self._found: dict[str, _Described] = {}
        self._made: dict[str, StoredTensor] = {}
        for file in files:
            start, metadata, entries = opened.header(file)
            parts = read_json(_PARTS, str(metadata.get(PARTS, "{}")), f"the parts of tensors in {file}")
            for entry in entries.values():
                whole = entry.name, 0, entry.shape, tuple(range(len(entry.shape)))
                name, first, shape, order = parts.get(entry.name, whole)
                _check_part(entry, first, shape, order)
                described = _Described(entry.dtype, shape, order, [])
                known = self._found.setdefault(name, described)
                if known[:3] != described[:3]:
                    raise ValueError(f"{name!r} is described differently by its parts")
                begin = first * entry.dtype.itemsize
                end = begin + entry.end - entry.begin
                known.pieces.append(_Piece(begin, end, file, start + entry.begin))

    def leaf(self, tree: dict[str, Any]) -> Any:
        """The placeholder of a leaf of a tree of values: equal names get the same tensor."""
        name = tree["name"]
        if name not in self._made:
            found = self._found.get(name)
            if found is None and "part_of" not in tree:
                raise ValueError(f"there is no tensor {name!r}")
            if found is None or "dtype" in tree:  # it is entirely in the files of other hosts, or stored as bytes
                dtype = dtype_of(tree.get("dtype") or tree["part_of"])
                shape = typed(_SHAPE, tree["shape"], f"the shape of {shown(name)!r}")
                if not is_shape(shape, math.prod(shape)):
                    raise Malformed(f"{shown(name)!r} cannot have the shape {shown(list(shape))}")
                found = _Described(dtype, shape, tuple(range(len(shape))), found.pieces if found else [])
            self._made[name] = StoredTensor(self._opened, name, *found)
        stored = self._made[name]
        return stored if tree[MARK] == "tensor" else StoredArray(tree[MARK], stored)


def stored_in(value: Any) -> Iterator[StoredTensor]:
    """All tensors in a value that are still in files."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, StoredArray):
        yield value.stored
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_in(item)


def fill(value: Any, like: Any = None) -> Any:
    """The value with its tensors read: into the corresponding tensors of `like`, a value of the same form, or into
    new ones on the CPU."""
    if isinstance(value, StoredTensor):
        return value.load(like)
    if isinstance(value, StoredArray):
        return value.load()
    if type(value) in (dict, OrderedDict):
        known = like if isinstance(like, dict) else {}
        return type(value)((key, fill(item, known.get(key))) for key, item in value.items())
    if type(value) in (list, tuple):
        given = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(fill(item, other) for item, other in zip(value, given, strict=True))
    return value
