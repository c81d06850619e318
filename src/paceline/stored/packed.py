"""A value with the tensors in it as bytes, for another rank, and back."""

import json
from typing import Any

import torch

from paceline.errors import Malformed
from paceline.stored.json_tree import Encoder, decode
from paceline.stored.tensor_file import TensorFile, bytes_of, file_parts
from paceline.typed_json import parse_json


def pack(value: Any, name: str, encoder: Encoder | None = None) -> bytes:
    """The bytes of a value that the encoder takes; `name` stands for it in errors."""
    encoder = encoder or Encoder()
    tree = json.dumps(encoder.encode(value, (name,))).encode()
    head, body = file_parts(encoder.tensors)
    return b"".join([len(tree).to_bytes(8, "little"), tree, head, *body])


def unpack(blob: torch.Tensor) -> Any:
    """The value that `pack` packed. Raises Malformed for anything else."""
    tree, tensors = content_of(blob)
    return decode(tree, tensors.__getitem__)


def content_of(blob: torch.Tensor) -> tuple[Any, TensorFile]:
    """The value that `pack` packed, still encoded. Raises Malformed for anything else."""
    content = bytes_of(blob)
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise Malformed(
            f"expected packed values, got {len(content)} bytes that claim to begin with {length} bytes of text"
        )
    tree = parse_json(bytes(content[8 : 8 + length]), "packed values")
    return tree, TensorFile(blob[8 + length :].clone())
