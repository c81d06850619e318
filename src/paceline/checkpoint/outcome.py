"""What the user is told of saves and loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_errors import NotSaved, Skipped


@dataclass(frozen=True)
class CheckpointEvent:
    """Something the user should know: `kind` is "saved", "failed", "skipped", "refused", "removed" or "left"
    (an old snapshot that could not be removed)."""

    kind: str
    step: int
    text: str
    path: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The outcome of a call of `save`, as far as it is known.

    `blocked_s` is how long the call blocked this rank, of which `waited_s` for the previous write. `skipped` says that
    the previous write was still under way, so nothing was saved. `problem` is what is known to have gone wrong: with
    the previous save, or with this one if it was not asynchronous.
    """

    step: int
    blocked_s: float
    waited_s: float = 0.0
    skipped: bool = False
    problem: NotSaved | None = None


@dataclass(frozen=True)
class Loaded:
    """What was loaded. `skipped` are the snapshots that were passed over.

    `more` holds all else that was saved: tensors on the CPU, and for what was `PerRank` a list of all ranks' values.
    """

    step: int
    path: Path
    world_size: int
    more: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()
