"""The state of a training run as files: described on every rank, copied on the rank that writes it, and compared by
shape."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.checkpoint_errors import CheckpointMismatch
from paceline.checkpoint.ranks import OptionalGroup, gather_bytes
from paceline.checkpoint.shards import model_state, names_of_params, optimizer_state, updated
from paceline.errors import CollectiveMismatch
from paceline.kernels import kernel_settings
from paceline.stored.json_tree import Encoder
from paceline.stored.packed import pack
from paceline.stored.tensor_file import bytes_of, lay_out, views
from paceline.stored.tensor_part import TensorPart
from paceline.stored.value_tree import dtype_name

MODEL, STATE, TREE = "model.safetensors", "state.safetensors", "state.json"
NAMED_AT_MOST = 3

Tensors = Mapping[str, torch.Tensor]
TensorSpec = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class PerRank:
    """A value that differs between ranks, such as `rng_state()`: all of them are saved, and loaded as a list."""

    value: Any


@dataclass(frozen=True)
class TrainingState:
    """What belongs to one snapshot. The tensors are still those of the run."""

    tree: bytes
    files: Mapping[str, Mapping[str, torch.Tensor | TensorPart]]  # by the name of the file that holds them
    shapes: Mapping[str, TensorSpec]
    equal: Mapping[str, Collection[str]]  # by file: the names of tensors with the same bits on all ranks that hold them


def state_of(value: Any) -> Any:
    """The state_dict() of an object that has one, or the plain value."""
    if isinstance(value, nn.Module):
        value = bare(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def capture(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any], group: OptionalGroup
) -> TrainingState:
    """All that is to be saved. Raises UsageError for values that cannot be saved. All ranks call it."""
    tree: dict[str, Any] = {}
    weights, rest = Encoder(), Encoder()
    shapes: Mapping[str, TensorSpec] = {}
    if model is not None:
        state = model_state(model)
        shapes = shapes_of(state)
        tree["model"] = weights.encode(dict(state))
        tree["model_metadata"] = rest.encode(getattr(state, "_metadata", None), ("model_metadata",))
    if optimizer is not None:
        tree["optimizer"] = rest.encode(optimizer_state(optimizer), ("optimizer",))
        tree["optimizer_kind"] = kind_of(optimizer)
        tree["optimizer_params"] = names_of_params(model, optimizer)
    lanes = lanes_in(model, more)
    equal = {MODEL: _replicas(model, weights, buffers=lanes is not None), STATE: {*rest.tensors}}
    tree["kernels"], tree["lanes"] = kernels_of(model), lanes
    tree["more"], tree["per_rank"] = {}, []
    for name, value in more.items():
        if isinstance(value, PerRank):
            blobs = gather_bytes(pack(state_of(value.value), name), group)
            value = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
            tree["per_rank"].append(name)
        in_shards = isinstance(value, torch.optim.Optimizer)
        tree["more"][name] = rest.encode(optimizer_state(value) if in_shards else state_of(value), ("more", name))
    files = {MODEL: weights.tensors | weights.parts, STATE: rest.tensors | rest.parts}
    return TrainingState(json.dumps(tree).encode(), files, shapes, equal)


def encoded(
    weights: Mapping[str, Any], optimizer: Mapping[str, Any] | None, params: Sequence[str] | None
) -> tuple[bytes, dict[str, Tensors]]:
    """States from another source, as the tree and the files of a snapshot."""
    model, rest = Encoder(), Encoder()
    tree: dict[str, Any] = {"model": model.encode(dict(weights)), "more": {}, "per_rank": []}
    if optimizer is not None:
        tree |= {"optimizer": rest.encode(optimizer, ("optimizer",)), "optimizer_params": params}
    return json.dumps(tree).encode(), {MODEL: model.tensors, STATE: rest.tensors}


def _replicas(model: nn.Module | None, weights: Encoder, *, buffers: bool) -> set[str]:
    """The tensors of a model that are equal on all ranks. Buffers are equal only in lanes: elsewhere each rank updates
    its own, until the next forward broadcasts those of one rank."""
    if model is None:
        return set()
    ignored = getattr(model, "parameters_to_ignore", ())
    names = {name for name, _ in bare(model).named_parameters(remove_duplicate=False)}
    if buffers:
        names |= {name for name, _ in bare(model).named_buffers(remove_duplicate=False)}
    return {name for name in weights.tensors if name in names and name not in ignored}


def lanes_in(model: nn.Module | None, more: Mapping[str, Any]) -> int | None:
    """How many lanes the replica among these trains in. Looked up by name: not every model here is paceline's."""
    found = (getattr(value, "_lane_count", None) for value in (model, *more.values()) if isinstance(value, nn.Module))
    return next((lanes for lanes in found if isinstance(lanes, int)), None)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's class, the same whether it updates whole parameters or shards of them."""
    return next(one.__name__ for one in type(optimizer).__mro__ if not one.__module__.startswith("paceline.replica"))


def whole_shapes(optimizer: torch.optim.Optimizer) -> list[torch.Size]:
    """The shapes of the parameters that an optimizer updates, or has shards of."""
    return [param.shape if shard is None else shard.form.shape for param, shard in updated(optimizer)]


def kernels_of(model: nn.Module | None) -> dict[str, str]:
    """Settings that the last bits of a step depend on."""
    device = next((param.device for param in model.parameters()), None) if model is not None else None
    compiled = any(hasattr(one, "_orig_mod") for one in (model, getattr(model, "module", None)))
    return kernel_settings(device) | {"compiled": str(compiled)}


class HostCopy:
    """Host memory for the tensors of one file. It is reused, because fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._layout = lay_out({})
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
        """Copy the tensors. From a CUDA device the copy is queued on the current stream, and readers wait for it."""
        layout = lay_out(tensors, metadata)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        on_device = bool(devices)
        if self._layout != layout or on_device != self._flat.is_pinned():
            self._views = []
            self._flat = torch.empty(layout.size, dtype=torch.uint8, pin_memory=on_device, device="cpu")
            self._layout, self._views = layout, views(layout, self._flat)
        with torch.no_grad():
            for view, entry in zip(self._views, layout.entries, strict=True):
                view.copy_(tensors[entry.name], non_blocking=True)
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    def taken(self) -> dict[str, torch.Tensor]:
        """Wait for the copies and return them."""
        self._wait()
        return {entry.name: view for entry, view in zip(self._layout.entries, self._views, strict=True)}

    def parts(self) -> list[bytes | memoryview]:
        """Wait for the copies and return the bytes of the file."""
        self._wait()
        return [self._layout.head, bytes_of(self._flat)]

    def _wait(self) -> None:
        for event in self._copied:
            event.synchronize()


def shapes_of(state: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: (dtype_name(value.dtype), tuple(value.shape))
        for name, value in state.items()
        if isinstance(value, torch.Tensor | TensorPart)
    }


def check_model(wanted: Mapping[str, TensorSpec], saved: Mapping[str, TensorSpec], where: str) -> None:
    """Raise CheckpointMismatch with the first tensors in which a model and a snapshot differ."""
    extra = next((f" (but {name!r}, which the model lacks)" for name in saved if name not in wanted), "")
    parts = [
        f"{name!r}: expected {expected}, got {got}{'' if name in saved else extra}"
        for name, expected, got in _differences(wanted, saved)
    ]
    if parts:
        raise CheckpointMismatch(
            f"{where} is a checkpoint of another model; the first difference is {_few(parts)}. Build the model as it "
            f"was built for the saved run"
        )


def different_models(by_rank: Sequence[Mapping[str, Any]]) -> CollectiveMismatch:
    """The error for ranks that save different models; `by_rank` are the shapes of each, as JSON carries them."""
    first, *others = ({name: (dtype, tuple(shape)) for name, (dtype, shape) in one.items()} for one in by_rank)
    parts = [
        f"{name!r}: expected {expected} as on rank 0, got {got} on rank {rank}"
        for rank, other in enumerate(others, start=1)
        for name, expected, got in _differences(first, other)
    ]
    return CollectiveMismatch(
        f"the ranks are about to save different models: {_few(parts)}. All ranks must pass the same model to save(); "
        f"nothing was saved",
        ranks=[rank for rank, other in enumerate(others, start=1) if other != first],
    )


def _differences(expected: Mapping[str, TensorSpec], got: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str, str]]:
    """Each tensor that is not the same in both: its name, and its description on either side."""
    for name in {**expected, **got}:
        if (one := expected.get(name)) != (other := got.get(name)):
            yield name, _text(one), _text(other)


def _text(spec: TensorSpec | None) -> str:
    return "no such tensor" if spec is None else f"{spec[0]} of shape {spec[1]}"


def _few(parts: Sequence[str]) -> str:
    more = len(parts) - NAMED_AT_MOST
    return "; ".join(parts[:NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
