"""What the processes of a job run on: this machine, or an engine that places them on several."""

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
        """Have a rank write where its threads are, and die."""

    def status(self, rank: int) -> ProcessStatus:
        """What the kernel says of a rank."""

    def stopped_children(self, rank: int) -> list[int]:
        """The processes that a rank has started and that were stopped by a signal."""

    def events(self) -> list[RankStarted | RankExited]:
        """What has happened since the last call."""

    def close(self) -> None:
        """End all that is left of the ranks, and wait until it has ended. Idempotent."""


class RankEngine(Protocol):
    """Where the ranks of a job run."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a rank has before it is told any."""

    def open(self) -> Processes:
        """Begin an attempt."""


class ThisMachine:
    """Ranks are processes here, and have the variables of this one."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    def open(self) -> Processes:
        return RankProcesses()
