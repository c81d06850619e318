"""Values as a JSON tree and named tensors, for files, and back.

A tensor that occurs twice (tied weights) is named twice and kept once.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from paceline.stored.tensor_part import TensorPart
from paceline.stored.value_tree import MARK, TreeEncoder, decode_tree, dtype_name, dtype_of, tensor_identity

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


class Encoder(TreeEncoder):
    """Turns values into trees. The tensors that they hold are collected in `tensors`, by name and not copied, and those
    of which this rank holds a part in `parts`."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.parts: dict[str, TensorPart] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._seen: list[object] = []  # kept alive, so that no other tensor can reuse their memory

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        if isinstance(value, TensorPart):
            return {MARK: "tensor", **self._part(value, path)}
        if isinstance(value, torch.Tensor):
            return {MARK: "tensor", **self._tensor(value, path)}
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
            return None
        word = "array" if isinstance(value, numpy.ndarray) else "scalar"
        try:
            # A copy, because torch warns of arrays that cannot be written.
            return {MARK: word, **self._tensor(torch.from_numpy(numpy.array(value)), path)}
        except TypeError as error:
            raise self.refuse(path, f"a numpy value of dtype {value.dtype}") from error

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        self.check_dense(value, path)
        value = value.detach()
        identity = tensor_identity(value)
        name = self._names.get(identity) if identity is not None else None
        if name is None:
            name = self._fresh(path)
            if identity is not None:
                self._names[identity] = name
            self._seen.append(value)
            plain = value.resolve_conj().resolve_neg()
            self.tensors[name] = plain if value.dtype in NATIVE else plain.contiguous().view(-1).view(torch.uint8)
        if value.dtype in NATIVE:
            return {"name": name}
        return {"name": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}

    def _part(self, value: TensorPart, path: tuple[str, ...]) -> dict[str, Any]:
        identity = ("part", id(value.values))  # an empty part of tied weights has no address of its own
        name = self._names.get(identity)
        if name is None:
            if value.dtype not in NATIVE and not value.form.is_contiguous():
                raise self.refuse(path, f"a part of a {value.dtype} tensor with strides {value.form.stride()}")
            name = self._names[identity] = self._fresh(path)
            self._seen.append(value)
            self.parts[name] = value if value.dtype in NATIVE else _part_as_bytes(value)
        described = {"name": name, "shape": list(value.shape), "part_of": dtype_name(value.dtype)}
        return described if value.dtype in NATIVE else {**described, "dtype": described["part_of"]}

    def _fresh(self, path: tuple[str, ...]) -> str:
        name = plain = "/".join(path)
        number = 1
        while name in self.tensors or name in self.parts or name in ("", RESERVED):
            number += 1
            name = f"{plain}#{number}"
        return name


def _part_as_bytes(part: TensorPart) -> TensorPart:
    size = part.dtype.itemsize
    form = torch.empty(part.form.numel() * size, dtype=torch.uint8, device="meta")
    return TensorPart(part.values.view(torch.uint8), part.begin * size, form)


def decode(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded. `tensor` gives a tensor by its name; equal names must get the same one."""
    return decode_tree(tree, lambda leaf: decode_tensor(leaf, tensor(leaf["name"])))


def decode_tensor(tree: dict[str, Any], value: torch.Tensor) -> Any:
    """What a leaf of a tree stands for, made from the tensor that was stored for it."""
    if "dtype" in tree:
        value = value.view(dtype_of(tree["dtype"])).view(tree["shape"])
    if tree[MARK] == "tensor":
        return value
    array = value.numpy()
    return array if tree[MARK] == "array" else array[()]
