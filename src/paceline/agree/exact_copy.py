"""Send values to another rank exactly, so that kernels there produce the same bits as here.

Beside values, bits depend on strides and on how memory is aligned, since these choose kernels; both are kept. There is
no pickle: plain values and containers are those of `stored/value_tree.py`, and an object of another kind, such as a
named tuple, a dataclass or a dict with methods, is made like one of the same kind that the receiving rank has itself.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from paceline.errors import Malformed, PacelineError
from paceline.stored.json_tree import Encoder, decode_tensor
from paceline.stored.packed import content_of
from paceline.stored.tensor_file import file_parts
from paceline.stored.value_tree import MARK, decode_tree
from paceline.typed_json import shown

ALIGNMENT = 64  # bytes; no kernel asks for more
# A tensor whose elements are spread further apart than this is refused: the receiver would have to allocate as much
# memory as the sender names.
MOST_BYTES, MOST_TIMES = 64 << 20, 4096
_OBJECT = "object"  # the key of an object's class in a leaf of the tree


class UnknownKind(PacelineError):
    """Another rank has sent an object of a class that this rank has no example of, so it cannot be rebuilt."""


class _ExactEncoder(Encoder):
    """Stores strides and alignment with every tensor."""

    refusal = "cannot be sent to another rank"
    instead = "make microbatches of these"

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        if (parts := _parts_of(value)) is not None:
            encoded = {name: self.encode(part, (*path, name)) for name, part in parts.items()}
            return {MARK: "scalar", _OBJECT: _kind(value), "parts": encoded}
        found = super().leaf(value, path)
        if found is None or not isinstance(value, torch.Tensor):
            return found
        if not _is_near(value.shape, value.stride(), value.dtype.itemsize):
            raise self.refuse(path, f"a tensor of strides {value.stride()}, most of whose memory is not its own")
        return {
            **found,
            "strides": list(value.stride()),
            "place": value.data_ptr() % ALIGNMENT,
            "on_device": value.device.type != "cpu",
            "requires_grad": value.requires_grad,
        }


def pack_exactly(value: Any, name: str) -> bytes:
    """The bytes of a value; `name` stands for it in errors. Raises UsageError for what cannot be sent."""
    encoder = _ExactEncoder()
    tree = json.dumps(encoder.encode(value, (name,))).encode()
    head, body = file_parts(encoder.tensors)
    return b"".join([len(tree).to_bytes(8, "little"), tree, head, *body])


def unpack_exactly(blob: torch.Tensor, device: torch.device, like: Any = None) -> Any:
    """What `pack_exactly` packed. Tensors that were on a device are on `device`. `like`: a value of this rank that
    holds an object of each class. Raises UnknownKind for a class that it does not hold, and Malformed for damaged
    bytes."""
    packed, tensors = content_of(blob)
    examples = {_kind(found): found for found in _objects_in(like)}
    made: dict[tuple[str, bool], torch.Tensor] = {}

    def leaf(tree: dict[str, Any]) -> Any:
        if _OBJECT in tree:
            if tree[_OBJECT] not in examples:
                raise UnknownKind(f"this rank holds no {shown(tree[_OBJECT])} to make one like it")
            return _made_like(examples[tree[_OBJECT]], {name: decode(part) for name, part in tree["parts"].items()})
        value = tensors[tree["name"]]
        if tree[MARK] != "tensor":
            return decode_tensor(tree, value)
        key = tree["name"], bool(tree["requires_grad"])
        if key not in made:
            plain = decode_tensor(tree, value)
            target = device if tree["on_device"] else torch.device("cpu")
            made[key] = _placed(plain, tree["strides"], tree["place"], target).requires_grad_(key[1])
        return made[key]

    def decode(tree: Any) -> Any:
        return decode_tree(tree, leaf)

    return decode(packed)


# ---- objects that are no plain values


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parts_of(value: Any) -> dict[str, Any] | None:
    """The parts of an object, by name. None for values that are not such objects."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, MutableMapping) and all(type(key) is str for key in value):
        return dict(value)
    return None


def _made_like(example: Any, parts: Mapping[str, Any]) -> Any:
    """An object of the class of `example`, with these parts."""
    if isinstance(example, tuple):
        return type(example)(*parts.values())
    found = copy.copy(example)
    if isinstance(found, MutableMapping):
        found.clear()
        found.update(parts)
        return found
    for name, part in parts.items():
        object.__setattr__(found, name, part)  # also where it is frozen
    return found


def _objects_in(value: Any) -> Iterator[Any]:
    """All objects in a value except plain containers."""
    parts = _parts_of(value)
    if parts is not None:
        if type(value) is not dict:
            yield value
        for part in parts.values():
            yield from _objects_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _objects_in(part)


# ---- tensors


def _is_near(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Whether the elements of a tensor are near enough to each other for a copy with these strides."""
    span = (1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))) * size
    return span <= max(MOST_BYTES, MOST_TIMES * math.prod(shape) * size)


def _placed(values: torch.Tensor, strides: list[int], place: int, device: torch.device) -> torch.Tensor:
    """A copy with these strides, whose memory begins as many bytes after an aligned address as it did before."""
    spans = [(size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)]
    if any(stride < 0 for stride in strides) or not _is_near(values.shape, strides, values.dtype.itemsize):
        raise Malformed(f"a tensor of shape {shown(list(values.shape))} cannot have the strides {shown(strides)}")
    if not values.numel() or any(stride == 0 and size > 1 for size, stride in zip(values.shape, strides, strict=True)):
        return values.to(device)  # several elements share memory, so there is none to be written to
    size = values.dtype.itemsize
    memory = torch.empty((1 + sum(spans)) * size + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    begin = (place - place % size - memory.data_ptr()) % ALIGNMENT
    room = memory[begin : begin + (1 + sum(spans)) * size].view(values.dtype)
    return room.as_strided(values.shape, strides, room.storage_offset()).copy_(values)
