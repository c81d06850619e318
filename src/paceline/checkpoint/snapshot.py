"""The state of a training run as files: described on every rank, copied and written where it is needed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.agree import Group, gather_bytes
from paceline.checkpoint.shapes import Kind, shapes_of
from paceline.errors import UsageError
from paceline.kernels import kernel_settings
from paceline.stored.tensor_file import Layout, TensorFile, bytes_of, lay_out, views
from paceline.stored.tree import Encoder, decode

MODEL, STATE, TREE = "model.safetensors", "state.safetensors", "state.json"


@dataclass(frozen=True)
class PerRank:
    """A value that differs between ranks, such as `rng_state()`: all of them are saved, and loaded as a list."""

    value: Any


@dataclass(frozen=True)
class Snapshot:
    """What belongs to one generation. The tensors are still those of the run."""

    tree: bytes
    model: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    shapes: Mapping[str, Kind]
    replicas: tuple[tuple[str, ...], tuple[str, ...]]  # names in `model` and `state` of what is equal on all ranks

    def replicated(self, *files: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What of the tensors of both files, or of copies of them, is equal on all ranks."""
        return [{name: tensors[name] for name in names} for tensors, names in zip(files, self.replicas, strict=True)]


def state_of(value: Any) -> Any:
    """What an object says about itself, or the plain value."""
    if isinstance(value, nn.Module):
        value = bare(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def describe(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any], group: Group
) -> Snapshot:
    """All that is to be saved. Raises UsageError for what cannot be. All ranks call it."""
    tree: dict[str, Any] = {}
    weights, rest = Encoder(), Encoder()
    shapes: Mapping[str, Kind] = {}
    if model is not None:
        state = bare(model).state_dict()
        shapes = shapes_of(state)
        tree["model"] = weights.encode(dict(state))
        tree["model_metadata"] = rest.encode(getattr(state, "_metadata", None), ("model_metadata",))
    if optimizer is not None:
        tree["optimizer"] = rest.encode(optimizer.state_dict(), ("optimizer",))
        tree["optimizer_kind"] = type(optimizer).__name__
    lanes = lanes_in(model, more)
    replicas = _replicas(model, weights, buffers=lanes is not None), tuple(rest.tensors)
    tree["kernels"], tree["lanes"] = kernel_settings(device_of(model)), lanes
    tree["more"], tree["per_rank"] = {}, []
    for name, value in more.items():
        if isinstance(value, PerRank):
            blobs = gather_bytes(pack(state_of(value.value), name), group)
            value = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
            tree["per_rank"].append(name)
        tree["more"][name] = rest.encode(state_of(value), ("more", name))
    return Snapshot(json.dumps(tree).encode(), weights.tensors, rest.tensors, shapes, replicas)


def _replicas(model: nn.Module | None, weights: Encoder, *, buffers: bool) -> tuple[str, ...]:
    """What of a model is the same on all ranks. Buffers are so in lanes only: elsewhere each rank makes its own, and
    takes over those of another one when its next forward begins."""
    if model is None:
        return ()
    ignored = getattr(model, "parameters_to_ignore", ())
    names = {name for name, _ in bare(model).named_parameters(remove_duplicate=False)}
    if buffers:
        names |= {name for name, _ in bare(model).named_buffers(remove_duplicate=False)}
    return tuple(name for name in weights.tensors if name in names and name not in ignored)


def lanes_in(model: nn.Module | None, more: Mapping[str, Any]) -> int | None:
    """How many lanes the replica among these trains in. Asked by name: not every model here is one of ours."""
    found = (getattr(value, "_lane_count", None) for value in (model, *more.values()) if isinstance(value, nn.Module))
    return next((lanes for lanes in found if isinstance(lanes, int)), None)


def device_of(model: nn.Module | None) -> torch.device | None:
    return next((param.device for param in model.parameters()), None) if model is not None else None


def pack(value: Any, name: str) -> bytes:
    """A value as bytes, for another rank."""
    encoder = Encoder()
    tree = json.dumps(encoder.encode(value, (name,))).encode()
    staging = Staging()
    staging.take({name: tensor.cpu() for name, tensor in encoder.tensors.items()})
    return len(tree).to_bytes(8, "little") + tree + b"".join(staging.parts())


def unpack(blob: torch.Tensor) -> Any:
    """What `pack` packed."""
    length = int.from_bytes(bytes_of(blob)[:8], "little")
    tensors = TensorFile(blob[8 + length :].clone())
    return decode(json.loads(bytes(bytes_of(blob)[8 : 8 + length])), tensors.__getitem__)


class Staging:
    """Host memory for the tensors of one file. It is kept, because fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors. From a CUDA device the copy is queued on the current stream, and `parts` waits for it."""
        layout = lay_out(tensors)
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
        """The copies, when they are complete."""
        if self._layout is None:
            raise UsageError("nothing was taken yet")
        for event in self._copied:
            event.synchronize()
        return {entry.name: view for entry, view in zip(self._layout.entries, self._views, strict=True)}

    def parts(self) -> list[bytes | memoryview]:
        """The bytes of the file."""
        if self._layout is None:
            raise UsageError("nothing was taken yet")
        for event in self._copied:
            event.synchronize()
        return [self._layout.head, bytes_of(self._flat)]
