"""Values between the notebook's kernel and the ranks: JSON and buffers of bytes. Nothing that arrives can run code.

Both sides use it. torch and numpy are loaded only where one of their values arrives.
"""

import math
import sys
import tokenize
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from paceline.errors import Malformed, UsageError
from paceline.stored.value_tree import MARK, TreeEncoder, decode_tree, dtype_name, dtype_of, tensor_identity
from paceline.typed_json import UNREADABLE, shown


def pack(value: object, name: str) -> tuple[dict[str, Any], list[bytes]]:
    """`value` as JSON and buffers, for `unpack`. `name` is its name in messages.

    None, bool, int, float, complex, str, bytes, lists, tuples, dicts and sets, numpy's arrays and scalars, tensors,
    and torch's dtypes, devices and sizes. A tensor travels as its values: it arrives on the CPU and outside of any
    graph. Two names of one tensor arrive as one. Raises UsageError, with the path in `value`, for anything else.
    """
    packer = _Packer()
    return {"value": packer.encode(value, (name,))}, packer.buffers


def unpack(content: Mapping[str, Any], buffers: Sequence[bytes]) -> object:
    """The value that was packed. Raises Malformed if `content` and `buffers` are not what `pack` gives."""
    tensors: dict[int, Any] = {}

    def leaf(tree: dict[str, Any]) -> Any:
        number = tree["buffer"]
        if tree[MARK] != "tensor":
            array = _from_npy(buffers[number])
            return array if tree[MARK] == "array" else array[()]
        if number not in tensors:
            tensors[number] = _tensor(buffers[number], tree["dtype"], tree["shape"])
        return tensors[number]

    try:
        return decode_tree(content["value"], leaf)
    except ModuleNotFoundError as error:
        raise UsageError(f"a value of {error.name} arrived, and {error.name} cannot be imported here") from error
    except Malformed:
        raise
    except UNREADABLE as error:
        raise Malformed(f"this is not a packed value: {type(error).__name__}: {error}") from error


class _Packer(TreeEncoder):
    refusal = "cannot be sent between the notebook and the ranks"
    instead = "send what it is made of, such as its state_dict()"

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[bytes] = []
        self._sent: dict[tuple[object, ...], int] = {}
        self._kept: list[object] = []  # tensors, so that their memory is not reused meanwhile

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        # If a module was never loaded, there can be no value of it.
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            return {MARK: "tensor", **self._tensor(value, path)}
        if numpy is not None and (type(value) in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)):
            try:
                word = "scalar" if isinstance(value, numpy.generic) else "array"
                return {MARK: word, "buffer": self._add(_npy(value))}
            except TypeError as error:
                raise self.refuse(path, str(error)) from error
        return None

    def _tensor(self, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        from paceline.stored.tensor_file import bytes_of

        self.check_dense(value, path)
        facts = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        identity = tensor_identity(value)
        if identity in self._sent:
            return {**facts, "buffer": self._sent[identity]}
        try:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            number = self._add(bytes(bytes_of(plain)))
        except (RuntimeError, NotImplementedError) as error:
            raise self.refuse(path, f"a tensor of {value.dtype} that torch cannot copy ({error})") from error
        if identity is not None:
            self._sent[identity] = number
            self._kept.append(value)
        return {**facts, "buffer": number}

    def _add(self, content: bytes) -> int:
        self.buffers.append(content)
        return len(self.buffers) - 1


def _npy(value: Any) -> bytes:
    import numpy
    from numpy.lib import format as npy

    # numpy's own format keeps every dtype and order, but calls the dtypes of other packages bytes.
    if value.dtype.hasobject or npy.descr_to_dtype(npy.dtype_to_descr(value.dtype)) != value.dtype:
        raise TypeError(f"a numpy value of dtype {value.dtype}")
    file = BytesIO()
    npy.write_array(file, numpy.asarray(value), allow_pickle=False)
    return file.getvalue()


def _from_npy(data: bytes) -> Any:
    from numpy.lib import format as npy

    file = BytesIO(data)
    version = npy.read_magic(file)
    try:
        # Version 3 differs from version 2 in the encoding of field names.
        shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    except (SyntaxError, tokenize.TokenError) as error:  # it tries to read what an old Python has written
        raise Malformed(f"expected an array of numpy's, got the header {shown(data[:200])}") from error
    left = len(data) - file.tell()
    # numpy would allocate whatever the header says.
    if dtype.hasobject or any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != left:
        raise Malformed(f"{left} bytes cannot be an array of {dtype} and shape {shown(list(shape))}")
    return npy.read_array(BytesIO(data), allow_pickle=False)


def _tensor(buffer: bytes, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    from paceline.stored.tensor_file import bytes_of

    kind, size = dtype_of(dtype), memoryview(buffer).nbytes
    if size != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{size} bytes cannot be a tensor of {dtype} and shape {tuple(shape)}")
    # Memory of torch's own: it is aligned as torch aligns, and kernels give the bits that they always give.
    flat = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        bytes_of(flat)[:] = memoryview(buffer).cast("B")
    return flat.view(kind).view(shape)
