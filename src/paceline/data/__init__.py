"""Distributing samples over ranks."""

from paceline.data.cursor import Cursor, order
from paceline.data.loader import Loader
from paceline.data.rank_checks import DataDiffers, check_first_batch
from paceline.data.sample_log import (
    SampleLog,
    SampleLogDamaged,
    SampleLogEntry,
    SampleLogReport,
    SampleLogSession,
    read_sample_log,
)
from paceline.data.sampler import DistributedSampler
from paceline.data.stream import shard
from paceline.data.workers import WorkerDied

__all__ = [
    "Cursor",
    "DataDiffers",
    "DistributedSampler",
    "Loader",
    "SampleLog",
    "SampleLogDamaged",
    "SampleLogEntry",
    "SampleLogReport",
    "SampleLogSession",
    "WorkerDied",
    "check_first_batch",
    "order",
    "read_sample_log",
    "shard",
]
