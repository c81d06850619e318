"""One hash of all that a run has learned, to compare runs by."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.snapshot import state_of
from paceline.stored.tensor_file import bytes_of
from paceline.stored.tree import Encoder, dtype_name


def digest(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, step: int, cursor: Any = None) -> str:
    """The SHA-256 of parameters, buffers, optimizer state, step and sample cursor, as 64 hexadecimal digits.

    `cursor` is a plain value or has a state_dict(). Names, dtypes, shapes and bytes are hashed in the order of names,
    so the same state gives the same digest on any device, in any wrapper, before and after a checkpoint.
    """
    state = {
        "model": None if model is None else bare(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "step": step,
        "cursor": state_of(cursor),
    }
    found = hashlib.sha256()
    for path, value in sorted(_leaves(state, ""), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found.update(f"{path} {dtype_name(host.dtype)} {list(host.shape)}\n".encode())
            found.update(bytes_of(host))
        else:
            found.update(f"{path} {json.dumps(value)}\n".encode())
    return found.hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index:08d}")
    elif isinstance(value, torch.Tensor):
        yield path, value
    else:
        encoder = Encoder()
        yield path, encoder.encode(value)
        for name, tensor in encoder.tensors.items():  # of numpy
            yield f"{path}/{name}", tensor
