"""A value with the tensors in it as bytes, for another rank, and back."""

import json
from typing import Any

import torch

from paceline.stored.json_tree import Encoder, decode
from paceline.stored.tensor_file import TensorFile, bytes_of, file_parts


def pack(value: Any, name: str, encoder: Encoder | None = None) -> bytes:
    """The bytes of a value that the encoder takes; `name` stands for it in errors."""
    encoder = encoder or Encoder()
    tree = json.dumps(encoder.encode(value, (name,))).encode()
    head, body = file_parts(encoder.tensors)
    return b"".join([len(tree).to_bytes(8, "little"), tree, head, *body])


def unpack(blob: torch.Tensor) -> Any:
    """What `pack` packed."""
    tree, tensors = unpack_tree(blob)
    return decode(tree, tensors.__getitem__)


def unpack_tree(blob: torch.Tensor) -> tuple[Any, TensorFile]:
    """What `pack` packed, as the encoder has left it."""
    length = int.from_bytes(bytes_of(blob)[:8], "little")
    return json.loads(bytes(bytes_of(blob)[8 : 8 + length])), TensorFile(blob[8 + length :].clone())
