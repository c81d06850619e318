"""How the ranks of a generation leave it together: the request travels in the step report, so all read it at once."""

from collections.abc import Sequence
from typing import Any

from paceline.reducer.report import Vote


def ask_regroup(replicas: Sequence[Any]) -> None:
    """Ask all ranks, in the next reduction, to end this generation after its step."""
    for replica in replicas:
        replica._core.reports.votes |= Vote.REGROUP


def asked_regroup(replicas: Sequence[Any]) -> bool:
    """Whether any rank has, in a reduction whose reports were read: the same on all ranks."""
    return any(Vote.REGROUP in vote for replica in replicas for vote in replica._core.reports.gathered_votes)
