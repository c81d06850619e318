"""Checkpoints: generations of files that are on disk whole or not at all, and are compared byte for byte when read."""

from paceline.checkpoint.checkpointer import Checkpointer, Event, Loaded, Saved
from paceline.checkpoint.digest import digest
from paceline.checkpoint.faults import CheckpointError, CheckpointMismatch, Damaged, NoCheckpoint, NotSaved, Skipped
from paceline.checkpoint.generations import Generation
from paceline.checkpoint.preemption import Preemption
from paceline.checkpoint.rng import rng_state, set_rng_state
from paceline.checkpoint.snapshot import PerRank
from paceline.checkpoint.weights import export_weights

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "Checkpointer",
    "Damaged",
    "Event",
    "Generation",
    "Loaded",
    "NoCheckpoint",
    "NotSaved",
    "PerRank",
    "Preemption",
    "Saved",
    "Skipped",
    "digest",
    "export_weights",
    "rng_state",
    "set_rng_state",
]
