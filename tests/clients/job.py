"""The job that every client runs, and what is compared of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn

EPOCHS = 2
STEPS = 3  # of an epoch
BATCH = 5


@dataclass(frozen=True)
class Job:
    """What a user asks a training framework for."""

    microbatches: int = 1
    clip: float | None = None
    precision: str = "32-true"  # in Lightning's words
    manual: bool = False  # Lightning: backward and step are called by the module
    recomputes: bool = False  # transformers: gradient checkpointing
    placement: str = "ddp"  # of ours


@dataclass(frozen=True)
class Trained:
    """What one rank has at the end."""

    weights: dict[str, torch.Tensor]
    losses: list[float]  # of this rank, one per microbatch, or as often as the framework tells


class Client(Protocol):
    """A module of this package: one training framework, used as its own documentation says."""

    def train(self, job: Job, ddp: type[nn.Module], save: Path, resume: Path | None) -> Trained:
        """Train for two epochs, and save a checkpoint under `save` after the first; or go on from one."""

    def checkpoint(self, save: Path) -> Path:
        """The checkpoint that was saved under `save` after the first epoch."""


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def samples(microbatches: int) -> torch.Tensor:
    """An epoch of two ranks."""
    return torch.randn(2 * STEPS * microbatches * BATCH, 8, generator=torch.Generator().manual_seed(100))


def batches(rank: int, microbatches: int) -> Iterator[torch.Tensor]:
    """One rank's microbatches of an epoch."""
    return iter(samples(microbatches).view(2, STEPS * microbatches, BATCH, 8)[rank])


def readme_source(word: str) -> str:
    """The Python block of the README that has `word` in it."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (
        block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if word in block
    )
    return str(block)


def readme_block(word: str) -> dict[str, Any]:
    """What that block defines."""
    names: dict[str, Any] = {}
    exec(readme_source(word), names)
    return names


def sharded(ddp: type[nn.Module], placement: str) -> type[nn.Module]:
    """The class with another placement, as the README derives it."""
    if placement == "ddp":
        return ddp
    text = readme_source("class Sharded").replace("zero2", placement)
    with in_the_place_of_torchs(ddp):
        names: dict[str, Any] = {}
        exec(text, names)
    found: type[nn.Module] = names["Sharded"]
    return found


@contextmanager
def in_the_place_of_torchs(substitute: type[nn.Module]) -> Iterator[None]:
    """For frameworks that look the class up in torch.nn.parallel and have no other way to choose it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.parallel, "DistributedDataParallel", substitute)
        yield


def copied(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
