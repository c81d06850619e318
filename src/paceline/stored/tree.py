"""Values as a JSON tree and named tensors, and back. Nothing that is read can run code.

Finite floats are JSON numbers, which Python writes and reads without loss. What JSON lacks is an object with the key
`$`. A tensor that occurs twice (tied weights) is named twice and kept once.
"""

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import UsageError

MARK = "$"
MAX_BITS = 4096
RESERVED = "__metadata__"  # a name that safetensors keeps for itself
NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_BUILD: dict[str, Callable[[Any], Any]] = {
    **{word: kind for kind, word in _MAPPINGS.items()},
    **{word: kind for kind, word in _SEQUENCES.items()},
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Encoder:
    """Turns values into trees. The tensors that they hold are collected in `tensors`, by name and not copied."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._seen: list[torch.Tensor] = []  # kept alive, so that no other tensor gets the memory of one of them

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """The tree of `value`. Raises UsageError, with the path to it, for what cannot be kept."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            # Python reads decimal numbers only up to a length.
            return value if value.bit_length() < MAX_BITS else {MARK: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARK: "float", "value": repr(value)}
        if kind is list:
            return [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind in _SEQUENCES:
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {MARK: _SEQUENCES[kind], "items": self.encode(list(items), path)}
        if isinstance(value, torch.Tensor):
            return {MARK: "tensor", **self._tensor(value, path)}
        return self._rare(value, path)

    def _mapping(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind is dict and MARK not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.encode(key, (*path, "key")), self.encode(item, (*path, str(key)))] for key, item in value.items()
        ]
        return {MARK: _MAPPINGS[kind], "items": items}

    def _rare(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind is bytes:
            return {MARK: "bytes", "value": value.hex()}
        if kind is complex:
            return {MARK: "complex", "items": [self.encode(value.real), self.encode(value.imag)]}
        if kind is torch.dtype:
            return {MARK: "dtype", "value": dtype_name(value)}
        if kind is torch.device:
            return {MARK: "device", "value": str(value)}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            word = "array" if isinstance(value, numpy.ndarray) else "scalar"
            try:
                # A copy, because torch warns of arrays that cannot be written.
                return {MARK: word, **self._tensor(torch.from_numpy(numpy.array(value)), path)}
            except TypeError as error:
                raise _refusal(path, f"a numpy value of dtype {value.dtype}") from error
        raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or hasattr(value, "to_local"):
            raise _refusal(path, f"a {type(value).__name__} of layout {value.layout} on {value.device}")
        value = value.detach()
        bits = (value.is_conj(), value.is_neg())
        place = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device, *bits)
        name = self._names.get(place) if value.numel() else None
        if name is None:
            name = self._fresh(path)
            self._names[place] = name
            self._seen.append(value)
            plain = value.resolve_conj().resolve_neg()
            self.tensors[name] = plain if value.dtype in NATIVE else plain.contiguous().view(-1).view(torch.uint8)
        if value.dtype in NATIVE:
            return {"name": name}
        return {"name": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}

    def _fresh(self, path: tuple[str, ...]) -> str:
        name = plain = "/".join(path)
        number = 1
        while name in self.tensors or name in ("", RESERVED):
            number += 1
            name = f"{plain}#{number}"
        return name


def decode(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded. `tensor` gives a tensor by its name; equal names must get the same one."""
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    word = tree.get(MARK)
    if word is None:
        return {key: decode(item, tensor) for key, item in tree.items()}
    if word in _MAPPINGS.values():
        pairs = [(decode(key, tensor), decode(item, tensor)) for key, item in tree["items"]]
        return _BUILD[word](dict(pairs) if word == "counter" else pairs)
    if word in _BUILD:
        return _BUILD[word](decode(tree["items"], tensor))
    if word in ("tensor", "array", "scalar"):
        return _decode_tensor(tree, tensor(tree["name"]))
    return _decode_rare(word, tree, tensor)


def _decode_tensor(tree: Any, value: torch.Tensor) -> Any:
    if "dtype" in tree:
        value = value.view(_dtype(tree["dtype"])).view(tree["shape"])
    if tree[MARK] == "tensor":
        return value
    array = value.numpy()
    return array if tree[MARK] == "array" else array[()]


def _decode_rare(word: Any, tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if word == "int":
        return int(tree["value"], 16)
    if word == "float":
        return float(tree["value"])
    if word == "bytes":
        return bytes.fromhex(tree["value"])
    if word == "complex":
        return complex(*decode(tree["items"], tensor))
    if word == "device":
        return torch.device(tree["value"])
    if word == "dtype":
        return _dtype(tree["value"])
    raise ValueError(f"a value of the unknown kind {word!r}; it was written by a newer version")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _refusal(path: tuple[str, ...], what: str) -> UsageError:
    return UsageError(
        f"{'.'.join(path) or 'the value'} cannot be kept in a checkpoint: expected None, bool, int, float, str, bytes, "
        f"a dense tensor, a numpy array or lists, tuples, sets and dicts of them, got {what}; "
        f"give the object a state_dict() made of these"
    )
