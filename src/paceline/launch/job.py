"""The input and output of a launcher: a job, its listener, its failure and its outcome."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.faults.fault import Fault
from paceline.launch.elastic_actions import Formed, Loss

WATCHDOG_EXIT = 124
INTERRUPT_EXIT = 130
# The exit code of a rank that was asked to stop by a signal and has saved.
STOPPED_EXIT = 143


@dataclass(frozen=True, kw_only=True)
class ElasticTerms:
    """The minimum and maximum number of ranks of a job, and what it does when ranks are lost.

    `spares` are started, with everything loaded, and wait until a rank is lost. After more than `max_losses` the job is
    given up; None is no limit. `recovery_s` is how long it waits below `minimum` ranks or for a generation to be
    formed; `patience_s` how long it waits for the others once enough are ready to begin.
    """

    minimum: int
    maximum: int
    spares: int = 0
    max_losses: int | None = None
    recovery_s: float = 600.0
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise UsageError(
                f"an elastic job needs at least 1 rank and a minimum of at most its maximum, got a minimum of "
                f"{self.minimum} and a maximum of {self.maximum}"
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks of one machine.

    `command` is executed once for each rank. Ranks find each other on loopback at `master_port`, or at any free port
    when it is 0. `gpu_ids` are the devices that ranks see, in order.
    Ranks that exit with one of `final_codes` are not restarted.
    `hang_timeout_s` replaces the learned timeout of the watchdog; 0 turns the watchdog off.
    `faults` are injected; each is armed in all ranks until it has happened. With `elastic`, lost ranks are replaced one
    by one if the script allows it; `ranks` is then the maximum.
    `token` distinguishes the ranks of this job from those of any other; `run_id` comes from the user and need not.
    """

    command: tuple[str, ...]
    ranks: int
    run_dir: Path
    master_port: int = 0
    gpu_ids: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    final_codes: frozenset[int] = frozenset()
    hang_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    run_id: str = ""
    role: str = "default"
    faults: tuple[Fault, ...] = ()
    elastic: ElasticTerms | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    @property
    def slots(self) -> int:
        """The maximum number of processes at a time."""
        return self.ranks + (self.elastic.spares if self.elastic is not None else 0)

    def __post_init__(self) -> None:
        if self.master_port > 65535:
            raise UsageError(f"master_port must be at most 65535, got {self.master_port}")
        if self.elastic is not None and self.ranks != self.elastic.maximum:
            raise UsageError(f"ranks must be the maximum of {self.elastic.maximum} in an elastic job, got {self.ranks}")
        for fault in self.faults:
            if fault.rank >= self.slots:
                there = "0" if self.slots == 1 else f"0 to {self.slots - 1}"
                raise UsageError(f"fault {str(fault)!r}: there is no rank {fault.rank}; expected {there}, or all")
        if self.gpu_ids is not None and len(self.gpu_ids) < self.slots:
            who = f"{self.ranks} ranks" + (f" and {self.slots - self.ranks} spares" if self.slots > self.ranks else "")
            raise UsageError(
                f"{who} need {self.slots} GPUs, got {len(self.gpu_ids)} in gpu_ids="
                f"{','.join(map(str, self.gpu_ids))}; name more of them or start fewer ranks"
            )


@dataclass(frozen=True)
class JobFailure:
    """Why a job failed. `ranks` are those at fault, all for the same reason.

    `details` are at most a dozen lines, `others` says how other ranks failed as a consequence.
    """

    ranks: tuple[int, ...]
    exit_code: int
    summary: str
    details: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.summary

    def lines(self) -> list[str]:
        """The text to show, in at most 14 lines: what happened, where, and the consequences."""
        return [self.summary, *(f"  {line}" for line in self.details), *self.others][:14]


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended. `signal` names the signal that ended it from outside, if one did; `final`: a restart would not
    help."""

    exit_code: int
    failure: JobFailure | None = None
    signal: str = ""
    final: bool = False


class Listener:
    """Receives what ranks write and report, and ignores it: override the methods you need.

    All calls come from the supervising thread; none may block for long.
    """

    def line(self, rank: int, text: str) -> None:
        """One line of output of a rank, without the newline."""

    def error_line(self, rank: int, text: str) -> None:
        """One line of standard error of a rank, without the newline."""
        self.line(rank, text)

    def reported(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Something that a rank has sent with `paceline.rank_report.report`."""

    def note(self, text: str) -> None:
        """A message of the launcher itself."""

    def lost(self, loss: Loss) -> None:
        """A member of an elastic job was lost."""

    def formed(self, formed: Formed) -> None:
        """The members of an elastic job have formed a generation."""

    def restarting(self, attempt: int, failure: JobFailure) -> None:
        """All ranks are about to be restarted, for the `attempt`-th time."""

    def tick(self) -> None:
        """Called about twenty times a second."""
