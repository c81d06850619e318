"""Where the processes of a job run: on this machine, or on several through an engine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.launch.rank_processes import RankExited, RankProcesses, RankStarted
from paceline.process_status import ProcessStatus


class Processes(Protocol):
    """The processes of all ranks in one attempt. `RankProcesses` are those of this machine."""

    living: dict[int, int]
    unkillable: list[int]
    reaper_died: bool

    def fileno(self) -> int:
        """Readable when there are events."""

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        out: int,
        err: int,
        folder: Path | None = None,
        named: Mapping[str, int] | None = None,
        stdin: bool = False,
    ) -> None:
        """Start a rank that writes to the descriptors `out` and `err`, and has those in `named`."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all of them."""

    def abort(self, rank: int) -> None:
        """Make a rank dump its threads' stacks and abort."""

    def status(self, rank: int) -> ProcessStatus:
        """The kernel's status of a rank."""

    def stopped_children(self, rank: int) -> list[int]:
        """The processes that a rank has started and that were stopped by a signal."""

    def events(self) -> list[RankStarted | RankExited]:
        """What has happened since the last call."""

    def close(self) -> None:
        """End all remaining processes of the ranks and wait for their end. Idempotent."""


class RankEngine(Protocol):
    """Where the ranks of a job run."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a rank before paceline adds its variables."""

    def open(self) -> Processes:
        """Begin an attempt."""


class ThisMachine:
    """Ranks are local processes and inherit this process's environment."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    def open(self) -> Processes:
        return RankProcesses()
