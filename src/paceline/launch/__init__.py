"""Starts and supervises the ranks of one machine. Loads no torch."""

from paceline.launch.devices import gpu_count
from paceline.launch.elastic_actions import Formed, Loss
from paceline.launch.job import ElasticTerms, Job, JobFailure, JobOutcome, Listener
from paceline.launch.lines import Fold, spans
from paceline.launch.rank_engine import Processes, RankEngine
from paceline.launch.supervise import supervise

__all__ = [
    "ElasticTerms",
    "Fold",
    "Formed",
    "Job",
    "JobFailure",
    "JobOutcome",
    "Listener",
    "Loss",
    "Processes",
    "RankEngine",
    "gpu_count",
    "spans",
    "supervise",
]
