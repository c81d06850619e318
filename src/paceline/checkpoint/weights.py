"""A model's weights alone, as one file that others read."""

import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.faults import NotSaved
from paceline.checkpoint.generations import held, temporary
from paceline.checkpoint.snapshot import Staging
from paceline.checkpoint.write import write_file
from paceline.errors import UsageError
from paceline.stored.directory import fsync_directory, make_directory
from paceline.stored.tree import NATIVE


def export_weights(model: nn.Module, path: str | Path) -> Path:
    """Write the weights of `model` to one safetensors file, and return its path. One rank is enough.

    The names are those of the bare model, whatever wraps it, so that
    `model.load_state_dict(safetensors.torch.load_file(path))` works. Tied weights are written under each of their
    names. A file of this name is replaced when the new one is on disk. Raises NotSaved if that fails.
    """
    path = Path(path)
    tensors = {}
    for name, value in bare(model).state_dict().items():
        if not isinstance(value, torch.Tensor) or value.dtype not in NATIVE:
            got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(f"{name} cannot be exported: expected a tensor of a dtype that safetensors has, got {got}")
        tensors[name] = value
    staging = Staging()
    staging.take(tensors)
    home = temporary(path.parent, f"step-{path.name}", "new")
    try:
        make_directory(path.parent)
        home.mkdir()
        with held(home):
            write_file(home / path.name, staging.parts())
            (home / path.name).replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise NotSaved(f"the weights could not be written to {path}: {error}", step=-1, rank=0) from error
    finally:
        with suppress(OSError):  # the first error is the one to tell
            shutil.rmtree(home)
    return path
