"""What saves and loads report to the user."""

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
    """The outcome of a call to `save`, as far as it is known.

    `blocked_s` is how long the call blocked this rank, of which `waited_s` for the previous write. `skipped` says that
    the previous write was still under way, so nothing was saved. `problem` is an error that is already known: of
    the previous save, or of this one if it was not asynchronous.
    """

    step: int
    blocked_s: float
    waited_s: float = 0.0
    skipped: bool = False
    problem: NotSaved | None = None


@dataclass(frozen=True)
class Loaded:
    """What was loaded. `skipped` are the snapshots that were skipped as damaged.

    `more` holds everything else that was saved: tensors on the CPU, and for a `PerRank` a list of all ranks' values.
    """

    step: int
    path: Path
    world_size: int
    more: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()
