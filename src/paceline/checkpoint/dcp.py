"""Checkpoints of torch.distributed.checkpoint (DCP), converted from snapshots and to snapshots. One process does it,
without a group, and needs memory for the whole state."""

import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import snapshots
from paceline.checkpoint.manifest import Manifest, versions
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.reader import Restored
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import MODEL, STATE, TREE, HostCopy, encoded, shapes_of
from paceline.checkpoint.stored_tensor import fill
from paceline.checkpoint.writer import write_snapshot
from paceline.errors import UsageError
from paceline.stored.directory import DirectoryLock, make_directory

PICKLED = ".metadata"  # the file that identifies DCP's own format


def export_dcp(
    snapshot: Snapshot | str | os.PathLike[str], target: str | os.PathLike[str], *, safetensors: bool = False
) -> Path:
    """Write the model and optimizer of a snapshot as a checkpoint of torch.distributed.checkpoint.

    Its names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`, under "model" and "optimizer", so
    FSDP2 and others load it at any number of ranks. Every byte of the snapshot is verified first. `safetensors=True`
    writes the weights alone, as safetensors in the layout of Hugging Face, without a pickle. The snapshot must be
    complete in its directory. Raises Damaged if it is damaged.
    """
    from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter, save

    opened = OpenSnapshot(snapshot if isinstance(snapshot, Snapshot) else snapshots.read(Path(snapshot)))
    opened.verify(opened.chunks())
    restored = Restored(opened, 0, 1)
    restored.check_complete()
    model = dict(fill(restored.model or {}))
    state: dict[str, Any] = {"model": model}
    if restored.optimizer is not None and not safetensors:
        state["optimizer"] = _by_name(fill(restored.optimizer), restored.optimizer_params)
    path = Path(target)
    with _one_process():
        if safetensors:
            save(model, storage_writer=HuggingFaceStorageWriter(str(path)), no_dist=True)
        else:
            save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def import_dcp(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: str = "model",
    optimizer: str = "optimizer",
    trust_pickle: bool = False,
) -> Snapshot:
    """Convert a checkpoint of torch.distributed.checkpoint to a snapshot in `directory`, for `Checkpointer.load`.

    `model` and `optimizer` are the keys of their states, as `get_state_dict` of
    `torch.distributed.checkpoint.state_dict` makes them. A directory of safetensors files is read without pickle. DCP's
    own format is made of pickles, and unpickling runs whatever code they hold: it is read only with
    `trust_pickle=True`, for files from a source whose programs you would run.
    """
    from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader

    path = Path(source)
    if (path / PICKLED).exists():
        if not trust_pickle:
            raise UsageError(
                f"{path} is in the format of torch.distributed.checkpoint, which is made of pickles: reading it runs "
                f"whatever code they hold. If you trust its author, pass trust_pickle=True; otherwise have it "
                f"exported as safetensors"
            )
        state = _read(FileSystemReader(path))
    elif any(path.glob("*.safetensors")):
        state = {model: _read(HuggingFaceStorageReader(str(path)))}
    else:
        raise UsageError(
            f"{path} holds no checkpoint of torch.distributed.checkpoint: neither {PICKLED} nor safetensors"
        )
    weights = _flat(state.get(model))
    if not weights:
        raise UsageError(f"{path} has no tensors under {model!r}: expected one of {', '.join(map(repr, state))}")
    packed, names = _by_number(state[optimizer]) if optimizer in state else (None, None)
    return _write(Path(directory), step, weights, packed, names)


def _write(
    directory: Path,
    step: int,
    weights: Mapping[str, Any],
    packed: Mapping[str, Any] | None,
    names: Sequence[str] | None,
) -> Snapshot:
    tree, files = encoded(weights, packed, names)
    make_directory(directory)
    lock = DirectoryLock(directory)
    if holder := lock.acquire():
        raise UsageError(f"nothing is imported to {directory}: {holder} saves there; choose another directory")
    found, _ = snapshots.survey(directory)
    number = max((one.manifest.number for one in found), default=0) + 1
    manifest = Manifest(step, number, secrets.randbits(60), 1, {}, shapes_of(weights), versions())
    parts = {}
    for file in (MODEL, STATE):
        copy = HostCopy()
        copy.take(files[file])
        parts[file] = copy.parts()
    try:
        return write_snapshot(directory, manifest, {**parts, TREE: [tree]})
    finally:
        lock.release()


def _read(reader: Any) -> dict[str, Any]:
    """The contents of a checkpoint, as they were before DCP flattened them."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        tensor = isinstance(described, TensorStorageMetadata)
        flat[name] = _empty(described) if tensor else None
    with _one_process():
        load(flat, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = (metadata.planner_data or {}).get(name, (name,))
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


def _empty(described: Any) -> torch.Tensor:
    return torch.empty(described.size, dtype=described.properties.dtype, device="cpu")


def _flat(state: Any) -> dict[str, Any]:
    """The tensors of a model's state, which DCP stores under dotted names."""
    return {name: value for name, value in (state or {}).items() if isinstance(value, torch.Tensor)}


def _by_name(packed: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The state of an optimizer as DCP stores it: by parameter name, not by number."""
    if names is None:
        raise UsageError(
            "the snapshot does not record which parameters its optimizer updates, so that cannot be exported; save "
            "model and optimizer together, or export the weights alone with safetensors=True"
        )
    places = [place for group in packed["param_groups"] for place in group["params"]]
    known = dict(zip(places, names, strict=True))
    groups = [{**group, "params": [known[place] for place in group["params"]]} for group in packed["param_groups"]]
    return {"state": {known[place]: values for place, values in packed["state"].items()}, "param_groups": groups}


def _by_number(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same in the other direction, with the names in the order of their numbers."""
    groups = state.get("param_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else groups
    if not groups or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise UsageError(
            "the optimizer's state has no list of param_groups: expected it as get_state_dict() makes it, without "
            "flatten_optimizer_state_dict; or pass another key as optimizer="
        )
    names = [name for group in groups for name in _listed(group["params"])]
    numbers = {name: number for number, name in enumerate(names)}
    packed = [{**group, "params": [numbers[name] for name in _listed(group["params"])]} for group in groups]
    known = {numbers[name]: values for name, values in state.get("state", {}).items() if name in numbers}
    return {"state": known, "param_groups": packed}, names


def _listed(params: Any) -> list[str]:
    return list(params.values()) if isinstance(params, dict) else list(params)


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence DCP's warning that there is no group: there need not be one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
