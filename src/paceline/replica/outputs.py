"""Finding tensors in whatever a model returns."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, dictionaries and dataclasses."""
    return _find(output, set())


def _find(output: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, (list, tuple)):
        items = list(output)
    elif isinstance(output, dict):
        items = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name, None) for field in fields(output)]
    else:
        return
    if id(output) in seen:  # a container that holds itself
        return
    seen.add(id(output))
    for item in items:
        yield from _find(item, seen)
