"""Finding tensors in whatever a model returns."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
