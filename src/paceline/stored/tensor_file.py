"""Files in the safetensors format, written from one buffer and read into one.

The format is a length, a JSON header and the bytes of all tensors without gaps. It is written here, and not by the
safetensors package, so that a file is hashed in the pass that writes it, and so that exactly those bytes are loaded
whose hash was compared.
"""

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import Malformed
from paceline.stored.json_tree import NATIVE, RESERVED
from paceline.typed_json import read_json, shown, typed

PARTS = "parts"  # in a header's metadata: which tensors of the file are parts of others, as JSON
MAX_DIMS = 64  # of a tensor; numpy has no more either
_TABLES: Any = dict[str, dict[str, Any]]
_DTYPES = {word: dtype for dtype, word in NATIVE.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _HeaderEntry:
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class FileLayout:
    """Where each tensor of a file lies. `head` is what precedes the tensors' bytes."""

    head: bytes
    entries: tuple[TensorEntry, ...]
    size: int


def lay_out(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The layout of a file of `tensors`: wide dtypes first, so that each tensor is aligned to its own elements.

    `metadata` is kept in the header, where readers of the format look for it.
    """
    entries, at = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        value = tensors[name]
        end = at + value.numel() * value.element_size()
        entries.append(TensorEntry(name, value.dtype, tuple(value.shape), at, end))
        at = end
    header: dict[str, object] = {
        entry.name: {
            "dtype": NATIVE[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for entry in entries
    }
    text = json.dumps({RESERVED: {"format": "pt", **(metadata or {})}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, tuple(entries), at)


def file_parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[memoryview]]:
    """A whole file: what precedes the tensors, and the memory of each, which is copied only where it has to be."""
    layout = lay_out(tensors, metadata)
    return layout.head, [bytes_of(tensors[entry.name].detach().cpu().contiguous()) for entry in layout.entries]


def views(layout: FileLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a layout as views of the buffer that holds their bytes."""
    return [flat[entry.begin : entry.end].view(entry.dtype).view(entry.shape) for entry in layout.entries]


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as the view."""
    size = flat.numel() * flat.element_size()
    if size == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class TensorFile:
    """A file that was read into `flat`. Raises Malformed if it is not in the safetensors format."""

    def __init__(self, flat: torch.Tensor) -> None:
        content = bytes_of(flat)
        if len(content) < 8 or (length := int.from_bytes(content[:8], "little")) > len(content) - 8:
            raise Malformed(f"the header does not fit in a file of {len(content)} bytes")
        self._body = flat[8 + length :]
        self.metadata, self._entries = parse_header(bytes(content[8 : 8 + length]), self._body.numel())
        self._given: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor by name, in memory of its own: the same one each time. Raises Malformed if there is none."""
        if name not in self._given:
            entry = self._entries.get(name)
            if entry is None:
                raise Malformed(f"there is no tensor {shown(repr(name))}")
            # Copied first: then it is aligned as torch aligns, and kernels give the bits that they always give.
            raw = self._body[entry.begin : entry.end].clone()
            self._given[name] = raw.view(entry.dtype).view(entry.shape)
        return self._given[name]


def parse_header(text: bytes, size: int) -> tuple[Mapping[str, object], dict[str, TensorEntry]]:
    """The metadata and the tensors of a file with `size` bytes behind this header. Raises Malformed."""
    header = dict(read_json(_TABLES, text, "the header of a file of tensors"))
    metadata = header.pop(RESERVED, {})
    return metadata, {name: _entry(name, fields, size) for name, fields in header.items()}


def _entry(name: str, fields: Mapping[str, object], size: int) -> TensorEntry:
    found = typed(_HeaderEntry, fields, f"a tensor of the header, {shown(name)!r}")
    dtype, shape, (begin, end) = _DTYPES.get(found.dtype), found.shape, found.data_offsets
    if dtype is None or not 0 <= begin <= end <= size or not is_shape(shape, (end - begin) // dtype.itemsize):
        raise Malformed(
            f"expected a tensor of a known type within {size} bytes, got {shown(name)!r} of type "
            f"{shown(found.dtype)!r} and shape {shown(shape)} at the bytes from {begin} to {end}"
        )
    if (end - begin) % dtype.itemsize:
        raise Malformed(f"{shown(name)!r} has {end - begin} bytes, expected whole elements of {dtype}")
    return TensorEntry(name, dtype, shape, begin, end)


def is_shape(shape: Sequence[int], elements: int) -> bool:
    """Whether a tensor of so many elements can have this shape. Without elements torch counts all lengths, too."""
    room = math.prod(max(1, length) for length in shape) < 1 << 63
    return len(shape) <= MAX_DIMS and all(length >= 0 for length in shape) and room and math.prod(shape) == elements
