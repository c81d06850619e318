"""Values as a tree of JSON, and back. Nothing that is read can run code.

Finite floats are JSON numbers, which Python writes and reads without loss. What JSON lacks is an object with the key
`$`. What becomes of tensors and arrays, the leaves, is up to the caller: checkpoints keep them in a file
(`stored/json_tree.py`), a notebook sends them beside the message (`notebook/values.py`).

This module loads neither torch nor numpy: the user's kernel of a notebook may have neither.
"""

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Any

from paceline.errors import UsageError
from paceline.typed_json import read_as

MARK = "$"
_EXACT = 1 << 53  # some readers of JSON keep no larger integers
MAX_DEPTH = 64  # and some no deeper trees than three levels for each of these
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_TO_TEXT: dict[type, Callable[[Any], str]] = {
    int: hex,
    float: repr,
    str: lambda value: value.encode("utf-8", "surrogatepass").hex(),
    bytes: bytes.hex,
    bytearray: bytearray.hex,
}
_FROM_ITEMS: dict[str, Callable[[Any], Any]] = {
    **{word: kind for kind, word in _MAPPINGS.items()},
    **{word: kind for kind, word in _SEQUENCES.items()},
    "complex": lambda items: complex(*items),
    "size": lambda items: import_module("torch").Size(items),
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "dtype": lambda text: dtype_of(text),
    "device": lambda text: import_module("torch").device(text),
}


class TreeEncoder:
    """Turns values into trees. A subclass says what becomes of tensors and arrays, by `leaf`."""

    refusal = "cannot be stored"
    instead = "give the object a state_dict() made of these"

    def __init__(self) -> None:
        self._above: set[int] = set()  # what holds the value that is encoded now

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        """The tree of a tensor or an array; None for what is neither."""
        raise NotImplementedError

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """The tree of `value`. Raises UsageError, with the path to it, for what has no tree."""
        kind = type(value)
        if (
            value is None
            or kind is bool
            or (kind is int and abs(value) < _EXACT)
            or (kind is float and math.isfinite(value))
            or (kind is str and _is_text(value))
        ):
            return value
        if kind in _TO_TEXT:
            return {MARK: kind.__name__, "value": _TO_TEXT[kind](value)}
        if kind is complex:
            return {MARK: "complex", "items": [self.encode(value.real), self.encode(value.imag)]}
        if kind is list or kind in _MAPPINGS or kind in _SEQUENCES:
            return self._container(value, path)
        torch: Any = sys.modules.get("torch")  # a value of a module that was never loaded cannot be here
        if torch is not None and kind is torch.Size:
            return {MARK: "size", "items": [int(length) for length in value]}
        if torch is not None and kind in (torch.dtype, torch.device):
            return {MARK: kind.__name__, "value": str(value).removeprefix("torch.")}
        found = self.leaf(value, path)
        if found is None:
            raise self.refuse(path, f"a {kind.__module__}.{kind.__qualname__}")
        return found

    def _container(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self._above:
            raise self.refuse(path, "something that contains itself")
        if len(path) > MAX_DEPTH:
            raise self.refuse(path, f"values nested more than {MAX_DEPTH} deep")
        self._above.add(id(value))
        kind = type(value)
        # What it holds is listed at once: the rank of a notebook goes on with its cell meanwhile.
        if kind in _MAPPINGS:
            found = self._mapping(kind, list(value.items()), path)
        else:
            held = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(held)]
            found = items if kind is list else {MARK: _SEQUENCES[kind], "items": items}
        self._above.remove(id(value))
        return found

    def _mapping(self, kind: type, pairs: list[tuple[Any, Any]], path: tuple[str, ...]) -> Any:
        if kind is dict and all(type(key) is str and key != MARK and _is_text(key) for key, _ in pairs):
            return {key: self.encode(item, (*path, key)) for key, item in pairs}
        items = [[self.encode(key, (*path, "key")), self.encode(item, (*path, str(key)))] for key, item in pairs]
        return {MARK: _MAPPINGS[kind], "items": items}

    def check_dense(self, tensor: Any, path: tuple[str, ...]) -> None:
        """Refuse a tensor whose values are not one dense block of memory."""
        odd = tensor.is_meta or tensor.is_quantized or tensor.is_nested or hasattr(tensor, "to_local")
        if odd or str(tensor.layout) != "torch.strided":
            what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, not dense"
            raise self.refuse(path, what)

    def refuse(self, path: tuple[str, ...], what: str) -> UsageError:
        """The error for a value that has no tree."""
        return UsageError(
            f"{'.'.join(path) or 'the value'} {self.refusal}: expected None, bool, int, float, str, bytes, "
            f"a dense tensor, a numpy array or lists, tuples, sets and dicts of them, got {what}; {self.instead}"
        )


def decode_tree(tree: Any, leaf: Callable[[dict[str, Any]], Any]) -> Any:
    """The value that was encoded. `leaf` gives what the encoder's `leaf` has written. Raises Malformed for a tree that
    no encoder has made."""
    with read_as("values that paceline has stored"):
        return _decoded(tree, leaf)


def _decoded(tree: Any, leaf: Callable[[dict[str, Any]], Any]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, leaf) for item in tree]
    if not isinstance(tree, dict):
        return tree
    word = tree.get(MARK)
    if word is None:
        return {key: _decoded(item, leaf) for key, item in tree.items()}
    if word in _MAPPINGS.values():
        pairs = [(_decoded(key, leaf), _decoded(item, leaf)) for key, item in tree["items"]]
        return _FROM_ITEMS[word](dict(pairs) if word == "counter" else pairs)
    if word in _FROM_ITEMS:
        return _FROM_ITEMS[word](_decoded(tree["items"], leaf))
    if word in _FROM_TEXT:
        return _FROM_TEXT[word](tree["value"])
    if word in ("tensor", "array", "scalar"):
        return leaf(tree)
    raise ValueError(f"a value of the unknown kind {word!r}; it was written by another version of paceline")


def tensor_identity(tensor: Any) -> tuple[object, ...] | None:
    """Equal for two names of one tensor, as tied weights are, as long as both are alive. None for an empty one."""
    if not tensor.numel():
        return None
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *bits)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> Any:
    """torch's dtype of this name."""
    torch = import_module("torch")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _is_text(value: str) -> bool:
    """Whether it is valid Unicode: half of a surrogate pair is not, and not every reader of JSON keeps it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
