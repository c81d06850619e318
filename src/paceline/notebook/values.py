"""Values between the notebook's kernel and the ranks: JSON and buffers of bytes. Nothing that arrives can run code.

The same on both sides. torch and numpy are loaded only where one of their values arrives.
"""

import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

from paceline.errors import UsageError

_MARK = "$"
_EXACT = 1 << 53  # some readers of JSON keep no larger numbers
_DEEPEST = 64  # and some no deeper trees than three levels for each of these
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_BUILD: dict[str, Callable[[Any], Any]] = {
    **{word: kind for kind, word in _MAPPINGS.items()},
    **{word: kind for kind, word in _SEQUENCES.items()},
    "size": lambda items: _module("torch").Size(items),
}


def pack(value: object, name: str) -> tuple[dict[str, Any], list[bytes]]:
    """`value` as JSON and buffers, for `unpack`. `name` is what messages call it.

    None, bool, int, float, complex, str, bytes, lists, tuples, dicts and sets, numpy's arrays and scalars, tensors,
    and torch's dtypes, devices and sizes. A tensor travels as its values: it arrives on the CPU and outside of any
    graph. Two names of one tensor arrive as one. Raises UsageError, with the place in `value`, for anything else.
    """
    packer = _Packer()
    return {"value": packer.tree(value, name, 0)}, packer.buffers


def unpack(content: Mapping[str, Any], buffers: Sequence[bytes]) -> object:
    """The value that was packed. Raises ValueError if `content` and `buffers` are not what `pack` gives."""
    try:
        return _Unpacker(buffers).value(content["value"])
    except (KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"this is no packed value: {type(error).__name__}: {error}") from error


class _Packer:
    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self._tensors: dict[tuple[object, ...], int] = {}
        self._kept: list[object] = []  # tensors, so that no other one gets the memory of one of them meanwhile
        self._above: set[int] = set()  # what holds the value that is packed now

    def tree(self, value: Any, place: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) < _EXACT else {_MARK: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {_MARK: "float", "value": struct.pack(">d", value).hex()}
        if kind is str:
            return value if _is_text(value) else self._bytes("str", value.encode("utf-8", "surrogatepass"))
        if kind is list or kind in _MAPPINGS or kind in _SEQUENCES:
            return self._holder(value, place, depth)
        return self._rare(value, place)

    def _holder(self, value: Any, place: str, depth: int) -> Any:
        if id(value) in self._above:
            raise _refusal(place, "something that holds itself")
        if depth >= _DEEPEST:
            raise _refusal(place, f"more than {_DEEPEST} values inside one another")
        self._above.add(id(value))
        # Lists of what is held are taken at once: a rank goes on with its cell meanwhile.
        kind = type(value)
        if kind in _MAPPINGS:
            found = self._mapping(value, place, depth + 1)
        elif kind in (set, frozenset):
            items = [self.tree(item, f"an element of {place}", depth + 1) for item in list(value)]
            found = {_MARK: _SEQUENCES[kind], "items": items}
        else:
            items = [self.tree(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(list(value))]
            found = items if kind is list else {_MARK: "tuple", "items": items}
        self._above.remove(id(value))
        return found

    def _mapping(self, value: Any, place: str, depth: int) -> Any:
        pairs = list(value.items())
        if type(value) is dict and all(type(key) is str and key != _MARK and _is_text(key) for key, _ in pairs):
            return {key: self.tree(item, f"{place}[{key!r}]", depth) for key, item in pairs}
        items = [
            [self.tree(key, f"a key of {place}", depth), self.tree(item, f"{place}[{key!r}]", depth)]
            for key, item in pairs
        ]
        return {_MARK: _MAPPINGS[type(value)], "items": items}

    def _rare(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in (bytes, bytearray):
            return self._bytes(kind.__name__, bytes(value))
        if kind is complex:
            return {_MARK: "complex", "value": struct.pack(">dd", value.real, value.imag).hex()}
        # A value of a module that was never loaded cannot be here.
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return self._tensor(value, place)
            if kind in (torch.dtype, torch.device):
                return {_MARK: kind.__name__, "value": str(value).removeprefix("torch.")}
            if kind is torch.Size:
                return {_MARK: "size", "items": [int(length) for length in value]}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and (kind in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)):
            return self._array(value, place)
        raise _refusal(place, f"a {kind.__module__}.{kind.__qualname__}")

    def _array(self, value: Any, place: str) -> Any:
        from numpy.lib import format as npy

        # numpy's own format keeps every dtype and order, but calls the dtypes of other packages bytes.
        if value.dtype.hasobject or npy.descr_to_dtype(npy.dtype_to_descr(value.dtype)) != value.dtype:
            raise _refusal(place, f"a numpy value of dtype {value.dtype}")
        import numpy

        file = BytesIO()
        npy.write_array(file, numpy.asarray(value), allow_pickle=False)
        word = "scalar" if isinstance(value, numpy.generic) else "array"
        return self._bytes(word, file.getvalue())

    def _tensor(self, value: Any, place: str) -> Any:
        import torch

        odd = value.is_meta or value.is_quantized or value.is_nested or hasattr(value, "to_local")
        if odd or value.layout is not torch.strided:
            raise _refusal(place, f"a {type(value).__name__} of layout {value.layout} on {value.device}, not dense")
        facts = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        bits = (value.is_conj(), value.is_neg())
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device, *bits)
        if value.numel() and key in self._tensors:
            return {_MARK: "tensor", **facts, "buffer": self._tensors[key]}
        try:
            found = self._bytes("tensor", _bytes_of(value))
        except (RuntimeError, NotImplementedError) as error:
            raise _refusal(place, f"a tensor of {value.dtype} that torch cannot copy ({error})") from error
        self._tensors[key] = found["buffer"]
        self._kept.append(value)
        return {**found, **facts}

    def _bytes(self, word: str, content: bytes) -> dict[str, Any]:
        self.buffers.append(content)
        return {_MARK: word, "buffer": len(self.buffers) - 1}


def _bytes_of(value: Any) -> bytes:
    from paceline.stored.tensor_file import bytes_of

    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(bytes_of(plain))


class _Unpacker:
    def __init__(self, buffers: Sequence[bytes]) -> None:
        self._buffers = buffers
        self._tensors: dict[object, Any] = {}

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        word = tree.get(_MARK)
        if word is None:
            return {key: self.value(item) for key, item in tree.items()}
        if word in _MAPPINGS.values():
            pairs = [(self.value(key), self.value(item)) for key, item in tree["items"]]
            return _BUILD[word](dict(pairs) if word == "counter" else pairs)
        if word in _BUILD:
            return _BUILD[word](self.value(tree["items"]))
        return self._from_buffer(word, tree) if "buffer" in tree else _from_text(word, tree["value"])

    def _from_buffer(self, word: str, tree: Any) -> Any:
        buffer = self._buffers[tree["buffer"]]
        if word == "tensor":
            key = tree["buffer"]
            if key not in self._tensors:
                self._tensors[key] = _tensor(buffer, tree["dtype"], tree["shape"])
            return self._tensors[key]
        if word in ("array", "scalar"):
            _module("numpy")
            from numpy.lib import format as npy

            array = npy.read_array(BytesIO(buffer), allow_pickle=False)
            return array if word == "array" else array[()]
        if word == "str":
            return bytes(buffer).decode("utf-8", "surrogatepass")
        if word == "bytes":
            return bytes(buffer)
        if word == "bytearray":
            return bytearray(buffer)
        raise _unknown(word)


def _tensor(buffer: bytes, dtype: str, shape: Sequence[int]) -> Any:
    torch: Any = _module("torch")
    from paceline.stored.tensor_file import bytes_of

    kind, size = _dtype(dtype), memoryview(buffer).nbytes
    if size != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{size} bytes cannot be a tensor of {dtype} and shape {tuple(shape)}")
    # Memory of torch's own: it is aligned as torch aligns, and kernels give the bits that they always give.
    flat = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        bytes_of(flat)[:] = memoryview(buffer).cast("B")
    return flat.view(kind).view(shape)


def _from_text(word: str, text: str) -> Any:
    if word == "int":
        return int(text, 16)
    if word == "float":
        return struct.unpack(">d", bytes.fromhex(text))[0]
    if word == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(text)))
    if word == "dtype":
        return _dtype(text)
    if word == "device":
        return _module("torch").device(text)
    raise _unknown(word)


def _dtype(name: str) -> Any:
    torch: Any = _module("torch")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found


def _module(name: str) -> ModuleType | Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"a value of {name} arrived, and {name} cannot be imported here: {error}") from error


def _is_text(value: str) -> bool:
    """Whether it is Unicode: half of a surrogate pair is not, and no reader of JSON keeps it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(word: object) -> ValueError:
    return ValueError(f"a value of the unknown kind {word!r}; it was sent by another version of paceline")


def _refusal(place: str, what: str) -> UsageError:
    return UsageError(
        f"{place} cannot travel between the notebook and the ranks: expected None, bool, int, float, str, bytes, a "
        f"dense tensor, a numpy array or lists, tuples, sets and dicts of them, got {what}; send what it is made of, "
        f"such as its state_dict()"
    )
