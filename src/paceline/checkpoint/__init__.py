"""Checkpoints: snapshots that are written atomically, and verified byte for byte when they are read."""

from paceline.checkpoint.checkpoint_errors import (
    CheckpointError,
    CheckpointMismatch,
    Damaged,
    NoCheckpoint,
    NotSaved,
    Skipped,
)
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.compare import digest
from paceline.checkpoint.dcp import export_dcp, import_dcp
from paceline.checkpoint.outcome import CheckpointEvent, Loaded, Saved
from paceline.checkpoint.preemption import Preemption
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import PerRank
from paceline.checkpoint.writer import export_weights
from paceline.randomness import rng_state, set_rng_state

__all__ = [
    "CheckpointError",
    "CheckpointEvent",
    "CheckpointMismatch",
    "Checkpointer",
    "Damaged",
    "Loaded",
    "NoCheckpoint",
    "NotSaved",
    "PerRank",
    "Preemption",
    "Saved",
    "Skipped",
    "Snapshot",
    "digest",
    "export_dcp",
    "export_weights",
    "import_dcp",
    "rng_state",
    "set_rng_state",
]
