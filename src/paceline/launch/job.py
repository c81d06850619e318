"""What a launcher is told and what it tells: a job, those who listen to it, how it failed, how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.errors import PacelineError, UsageError
from paceline.world.environment import is_loopback

WATCHDOG_EXIT = 124
INTERRUPT_EXIT = 130
MIN_SECRET = 16


class LaunchError(PacelineError, RuntimeError):
    """The launcher itself could not do its work."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks of one machine, and which machine of how many this is.

    `command` is executed once for each rank. `master_addr` and `master_port` are where the launchers of several
    machines meet; on one machine ranks meet on loopback, at any free port when the port is 0. `secret` is what
    launchers of several machines must share. `gpu_ids` are the devices that ranks see, in order.
    Ranks that end with one of `final_codes` are not started again.
    `hang_timeout_s` replaces the learned timeout of the watchdog; 0 turns the watchdog off.
    """

    command: tuple[str, ...]
    ranks: int
    run_dir: Path
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    gpu_ids: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    final_codes: frozenset[int] = frozenset()
    hang_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    join_timeout_s: float = 600.0
    secret: bytes = field(default=b"", repr=False)
    run_id: str = ""
    role: str = "default"
    folder: Path | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        if not self.command:
            raise UsageError("there is nothing to run: expected a command, got none")
        if self.gpu_ids is not None and len(self.gpu_ids) < self.ranks:
            raise UsageError(
                f"{self.ranks} ranks need {self.ranks} GPUs, got {len(self.gpu_ids)} in gpu_ids="
                f"{','.join(map(str, self.gpu_ids))}; name more of them or start fewer ranks"
            )
        if self.nodes > 1:
            self._check_nodes()
        elif not is_loopback(self.master_addr):
            raise UsageError(
                f"master_addr={self.master_addr} was given for one machine, whose ranks meet on loopback; "
                f"leave it out, or say how many machines there are"
            )

    def _check_numbers(self) -> None:
        lowest = {"ranks": 1, "nodes": 1, "node_rank": 0, "master_port": 0, "max_restarts": 0}
        for name, low in lowest.items():
            number = getattr(self, name)
            if type(number) is not int or number < low:
                raise UsageError(f"{name} must be a whole number of at least {low}, got {number!r}")
        if self.master_port > 65535:
            raise UsageError(f"master_port must be at most 65535, got {self.master_port}")
        if self.node_rank >= self.nodes:
            raise UsageError(f"node_rank must be below the number of nodes, {self.nodes}, got {self.node_rank}")
        for name in ("shutdown_timeout_s", "join_timeout_s", "hang_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds >= 0:
                raise UsageError(f"{name} must be a number of seconds of at least 0, got {seconds!r}")

    def _check_nodes(self) -> None:
        if is_loopback(self.master_addr) or not self.master_port:
            raise UsageError(
                f"{self.nodes} machines need --master-addr, an address of machine 0 that the others reach, and "
                f"--master-port: got {self.master_addr}:{self.master_port}, which no other machine reaches"
            )
        if len(self.secret) < MIN_SECRET:
            raise UsageError(
                f"launchers of several machines need a secret that they share: expected at least {MIN_SECRET} bytes in "
                f"PACELINE_JOB_SECRET or --secret-file, the same on all machines, got "
                f"{len(self.secret) or 'none'}"
            )


@dataclass(frozen=True)
class Failure:
    """Why a job failed. `ranks` are those at fault, all for the same reason.

    `kind` is one of "exception", "signal", "exit", "memory", "frozen", "spinning", "never started", "keeper", "node".
    `details` are at most a dozen lines, `others` says what became of other ranks because of it.
    """

    ranks: tuple[int, ...]
    kind: str
    exit_code: int
    summary: str
    details: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    step: int | None = None
    follows: bool = False  # these ranks fell because others did, and who did is not known here

    def __str__(self) -> str:
        return self.summary

    def lines(self) -> list[str]:
        """All that is to be shown, in at most 14 lines: what happened, where, and what came of it."""
        return [self.summary, *(f"  {line}" for line in self.details), *self.others][:14]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `signal` names the signal that ended it from outside, if one did."""

    exit_code: int
    failure: Failure | None = None
    restarts: int = 0
    signal: str = ""


class Listener(Protocol):
    """The launcher's screen. All calls come from the thread that supervises, and none may block for long."""

    def line(self, rank: int, text: str) -> None:
        """One line of output of a rank, without its end."""

    def told(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Something a rank has told with `paceline.tell.tell`.

        The supervisor itself tells "placed" when ranks are started: first_rank, world_size, attempt.
        """

    def restarting(self, attempt: int, failure: Failure) -> None:
        """All ranks are started again, for the `attempt`-th time."""

    def tick(self) -> None:
        """Comes about twenty times a second."""


@runtime_checkable
class HearsErrors(Protocol):
    """A listener with this method gets lines of standard error here, and not through `line`."""

    def error_line(self, rank: int, text: str) -> None: ...


@runtime_checkable
class HearsNotes(Protocol):
    """A listener with this method gets what the launcher itself has to say."""

    def note(self, text: str) -> None: ...
