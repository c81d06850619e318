"""For which job a process saves, and how late in that job.

A rank that its launcher has given up may live on: its machine is frozen, or cut off. It keeps its lock on the directory
of checkpoints, and may go on when nobody expects it any more. A rank of a later generation of the same job, or of a
later attempt, may take the directory over from it, and from nobody else.
"""

import os
import re
from dataclasses import dataclass

from paceline.member import Member
from paceline.member_messages import NEVER
from paceline.rank_report import JOB_NAME

_SIGNED = re.compile(r", job ([0-9a-f]{16}), attempt (\d{1,9}), generation (-1|\d{1,9})\Z")


@dataclass(frozen=True)
class Tenure:
    """Which job, which attempt of it, and which generation of that; `NEVER` in a job that is not elastic."""

    job: str
    attempt: int
    generation: int

    @classmethod
    def own(cls) -> "Tenure | None":
        """That of this process; None where no launcher of ours has started it."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        member = Member.own()
        generation = member.generation if member is not None else None
        number = NEVER if generation is None else generation.number
        return cls._parse(f", job {os.environ.get(JOB_NAME)}, attempt {attempt}, generation {number}")

    @classmethod
    def _parse(cls, text: str) -> "Tenure | None":
        found = _SIGNED.search(text)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f", job {self.job}, attempt {self.attempt}, generation {self.generation}"

    def follows(self, holder: str) -> bool:
        """Whether `holder`, as it has signed, is of the same job and was given up before this began."""
        other = self._parse(holder)
        return (
            other is not None
            and other.job == self.job
            and (other.attempt, other.generation) < (self.attempt, self.generation)
        )
