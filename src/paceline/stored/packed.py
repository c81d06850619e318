"""A value with the tensors in it as bytes, for another rank, and back."""

import json
from typing import Any

import torch

from paceline.stored.json_tree import Encoder, decode
from paceline.stored.tensor_file import TensorFile, bytes_of, file_parts


def pack(value: Any, name: str) -> bytes:
    """The bytes of a value that the encoder takes; `name` stands for it in errors."""
    encoder = Encoder()
    tree = json.dumps(encoder.encode(value, (name,))).encode()
    head, body = file_parts(encoder.tensors)
    return b"".join([len(tree).to_bytes(8, "little"), tree, head, *body])


def unpack(blob: torch.Tensor) -> Any:
    """What `pack` packed."""
    length = int.from_bytes(bytes_of(blob)[:8], "little")
    tensors = TensorFile(blob[8 + length :].clone())
    return decode(json.loads(bytes(bytes_of(blob)[8 : 8 + length])), tensors.__getitem__)
