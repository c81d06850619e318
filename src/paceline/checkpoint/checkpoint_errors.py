"""The errors of checkpoints.

PacelineError
└── CheckpointError
    ├── NotSaved                        a snapshot could not be written; `step` says which, `rank` where
    ├── Damaged                         a snapshot is damaged; `path` and `why`
    ├── NoCheckpoint       (UsageError) there is no snapshot to load; `skipped` says what was refused and why
    └── CheckpointMismatch (UsageError) the snapshot was made from another model, optimizer or set of objects
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, UsageError


@dataclass(frozen=True)
class Skipped:
    """A snapshot that was skipped, the rank that refused it, and why."""

    path: str
    rank: int
    why: str

    def __str__(self) -> str:
        return f"{self.path} (rank {self.rank}): {self.why}"


class CheckpointError(PacelineError):
    """Something went wrong with a checkpoint."""


class NotSaved(CheckpointError):
    """A snapshot could not be written. Training can continue: earlier snapshots are still there."""

    def __init__(self, message: str, *, step: int, rank: int) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank


class Damaged(CheckpointError):
    """A snapshot differs from what was written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is a damaged snapshot: {why}")
        self.path = path
        self.why = why

    def __reduce__(self) -> tuple[type["Damaged"], tuple[Path, str]]:
        return (type(self), (self.path, self.why))


class NoCheckpoint(CheckpointError, UsageError):
    """There is no snapshot that can be loaded."""

    def __init__(self, message: str, *, skipped: Sequence[Skipped] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class CheckpointMismatch(CheckpointError, UsageError):
    """The snapshot was made from another model or optimizer, or lacks something that was asked for."""
