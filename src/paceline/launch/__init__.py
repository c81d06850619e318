"""Starts and supervises the ranks of one machine. Loads no torch."""

from paceline.launch.devices import gpu_count
from paceline.launch.job import Job, JobFailure, JobOutcome, Listener
from paceline.launch.lines import Fold, spans
from paceline.launch.supervise import supervise

__all__ = [
    "Fold",
    "Job",
    "JobFailure",
    "JobOutcome",
    "Listener",
    "gpu_count",
    "spans",
    "supervise",
]
