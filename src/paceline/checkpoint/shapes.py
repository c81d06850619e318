"""Names, dtypes and shapes of a model's tensors, and the words for where two models differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint.faults import CheckpointMismatch
from paceline.errors import CollectiveMismatch
from paceline.stored.tree import dtype_name

Kind = tuple[str, tuple[int, ...]]  # dtype and shape
NAMED_AT_MOST = 3


def shapes_of(state: Mapping[str, Any]) -> dict[str, Kind]:
    return {
        name: (dtype_name(value.dtype), tuple(value.shape))
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def check_model(wanted: Mapping[str, Kind], saved: Mapping[str, Kind], where: str) -> None:
    """Raise CheckpointMismatch with the first tensors in which a model and a generation differ."""
    near = next((name for name in saved if name not in wanted), None)
    but = f" (but {near!r}, which the model lacks)" if near else ""
    parts = [
        f"{name!r}: expected {_text(wanted.get(name))}, got {_text(saved.get(name))}{but if name not in saved else ''}"
        for name in {**wanted, **saved}
        if wanted.get(name) != saved.get(name)
    ]
    if parts:
        raise CheckpointMismatch(
            f"{where} is a checkpoint of another model; the first difference is {_few(parts)}. Build the model as it "
            f"was built for the saved run"
        )


def as_text(shapes: Mapping[str, Kind]) -> str:
    """For other ranks: equal where the models are."""
    return json.dumps(shapes, sort_keys=True)


def different_models(told: Sequence[str]) -> CollectiveMismatch:
    """The error for ranks that save different models; `told` is what `as_text` says on each."""
    first, *others = ({name: _kind(*kind) for name, kind in json.loads(text).items()} for text in told)
    parts = [
        f"{name!r}: expected {_text(first.get(name))} as on rank 0, got {_text(other.get(name))} on rank {rank}"
        for rank, other in enumerate(others, start=1)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    return CollectiveMismatch(
        f"the ranks are about to save different models: {_few(parts)}. All ranks must give save() the same model; "
        f"nothing was saved",
        ranks=[rank for rank, other in enumerate(others, start=1) if other != first],
    )


def _kind(dtype: str, shape: Sequence[int]) -> Kind:
    return dtype, tuple(shape)


def _text(kind: Kind | None) -> str:
    return "no such tensor" if kind is None else f"{kind[0]} of shape {kind[1]}"


def _few(parts: Sequence[str]) -> str:
    more = len(parts) - NAMED_AT_MOST
    return "; ".join(parts[:NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
