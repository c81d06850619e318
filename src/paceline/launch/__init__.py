"""Starting the ranks of one machine and watching over them. Loads no torch."""

from paceline.launch.devices import gpu_count
from paceline.launch.job import Failure, HearsErrors, HearsNotes, Job, LaunchError, Listener, Outcome
from paceline.launch.lines import Fold, spans
from paceline.launch.supervise import supervise

__all__ = [
    "Failure",
    "Fold",
    "HearsErrors",
    "HearsNotes",
    "Job",
    "LaunchError",
    "Listener",
    "Outcome",
    "gpu_count",
    "spans",
    "supervise",
]
