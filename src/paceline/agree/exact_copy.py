"""What one rank was given, moved to another rank exactly: kernels there must give the bits that they gave here.

Beside values, bits depend on strides and on how memory is aligned, since these choose kernels; both are kept. There is
no pickle, so what may be sent is what `stored/value_tree.py` has trees for.
"""

from typing import Any

import torch

from paceline.stored.json_tree import Encoder, decode_tensor
from paceline.stored.packed import pack, unpack_tree
from paceline.stored.value_tree import MARK, decode_tree

ALIGNMENT = 64  # bytes; no kernel asks for more


class _ExactEncoder(Encoder):
    """Notes beside every tensor what its values do not say."""

    refusal = "cannot be sent to another rank"
    instead = "make microbatches of these"

    def leaf(self, value: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
        found = super().leaf(value, path)
        if found is None or not isinstance(value, torch.Tensor):
            return found
        return {
            **found,
            "strides": list(value.stride()),
            "place": value.data_ptr() % ALIGNMENT,
            "on_device": value.device.type != "cpu",
            "requires_grad": value.requires_grad,
        }


def pack_exactly(value: Any, name: str) -> bytes:
    """The bytes of a value; `name` stands for it in errors. Raises UsageError for what cannot be sent."""
    return pack(value, name, _ExactEncoder())


def unpack_exactly(blob: torch.Tensor, device: torch.device) -> Any:
    """What `pack_exactly` packed. Tensors that were on a device are on `device`."""
    described, tensors = unpack_tree(blob)
    made: dict[tuple[str, bool], torch.Tensor] = {}

    def leaf(tree: dict[str, Any]) -> Any:
        value = tensors[tree["name"]]
        if tree[MARK] != "tensor":
            return decode_tensor(tree, value)
        key = tree["name"], bool(tree["requires_grad"])
        if key not in made:
            plain = decode_tensor(tree, value)
            target = device if tree["on_device"] else torch.device("cpu")
            made[key] = _placed(plain, tree["strides"], tree["place"], target).requires_grad_(key[1])
        return made[key]

    return decode_tree(described, leaf)


def _placed(values: torch.Tensor, strides: list[int], place: int, device: torch.device) -> torch.Tensor:
    """A copy with these strides, whose memory begins as many bytes after an aligned address as it did before."""
    spans = [(size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)]
    if not values.numel() or any(stride == 0 and size > 1 for size, stride in zip(values.shape, strides, strict=True)):
        return values.to(device)  # several elements share memory, so there is none to be written to
    size = values.dtype.itemsize
    memory = torch.empty((1 + sum(spans)) * size + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    begin = (place - place % size - memory.data_ptr()) % ALIGNMENT
    room = memory[begin : begin + (1 + sum(spans)) * size].view(values.dtype)
    return room.as_strided(values.shape, strides, room.storage_offset()).copy_(values)
