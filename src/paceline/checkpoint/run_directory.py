"""The directory of a run as one rank sees it: which other ranks see it, which run saves there, and the number of the
next save."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint import snapshots
from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.checkpoint.ranks import OptionalGroup, homes_of, rank_and_size
from paceline.checkpoint.tenure import Tenure
from paceline.errors import UsageError
from paceline.stored.directory import DirectoryLock, make_directory


class RunDirectory:
    """Owned by one run at a time, by a lock that ends with its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = -1  # of the newest snapshot; -1: not looked up yet
        self._homes: list[int] | None = None
        self._lock = DirectoryLock(path)

    def homes(self, group: OptionalGroup) -> list[int]:
        """For each rank, the lowest that sees the same directory. All ranks call it."""
        if self._homes is None:
            self._homes = homes_of(self.path, group)
        return self._homes or [0] * rank_and_size(group)[1]

    def follow_group(self) -> None:
        """The world has changed: ask again which ranks see the same directory."""
        self._homes = None

    def own(self) -> str:
        """Keep other runs from saving here. Returns the current holder, or an empty string.

        A rank of this job that was given up and cannot be ended loses the directory: what it is about to complete has
        no home any more, and `check_owned` guards what it may begin.
        """
        try:
            make_directory(self.path)
            tenure = Tenure.own()
            holder = self._lock.acquire(str(tenure or ""))
            if holder and tenure is not None and tenure.follows(holder):
                self._lock.take_over(str(tenure))
                snapshots.remove_unfinished(self.path)
                holder = ""
            return holder
        except OSError:  # the write will fail for the same reason, and report it
            return ""

    def check_owned(self) -> None:
        """Raise CheckpointError if a later generation of this job has taken the directory over."""
        if self._lock.is_lost:
            raise CheckpointError(
                f"{self.path} belongs to a later generation of this job, which has given up this process"
            )

    def release(self) -> None:
        """Let other runs save here."""
        self._lock.release()

    def refuse_second(self, holders: Sequence[str]) -> NoReturn:
        """Raise in a run that would save where another run does. `holders`: what `own` returned on each rank."""
        rank, holder = next((rank, text) for rank, text in enumerate(holders) if text)
        raise UsageError(
            f"rank {rank} cannot save to {self.path}: {holder} saves there, and two runs in one directory would "
            f"remove each other's checkpoints; give this run a directory of its own, or end the other one"
        )

    def next_number(self) -> int:
        """The number of the next save, as far as this rank knows."""
        if self.number < 0:
            try:
                found, _ = snapshots.survey(self.path)
            except OSError:  # the write will fail for the same reason, and report it
                found = []
            self.number = max((one.manifest.number for one in found), default=0)
        return self.number + 1

    def remaining(self) -> str:
        """The names of the existing snapshots, as text."""
        kept = snapshots.listed(self.path) if os.access(self.path, os.R_OK | os.X_OK) else []
        return ", ".join(path.name for path in kept) or "none"
