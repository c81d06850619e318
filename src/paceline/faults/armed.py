"""Armed faults, which happen when a rank notes that it has reached their phase and step."""

import logging
import os

from paceline.errors import UsageError
from paceline.faults.fault import FAULTS_NAME, Fault, once_less, parse, parse_all
from paceline.faults.inject import InjectedFault, inject
from paceline.member import in_elastic_job
from paceline.progress import Phase, Progress, own_progress
from paceline.rank_report import PROGRESS_SLOT, REPORT_NAME, report
from paceline.world import World
from paceline.world.environment import Variables

MOST_RESTARTS = 10_000  # of a job, up to which its faults are counted

logger = logging.getLogger("paceline")

__all__ = ["ArmedProgress", "InjectedFault", "arm", "arm_from_environment", "disarm"]


class ArmedProgress(Progress):
    """Notes progress, and then checks whether a fault is due."""

    def __init__(self, before: Progress, rank: int | None) -> None:
        super().__init__(before.memory or memoryview(bytearray(PROGRESS_SLOT)))
        self.step, self.phase = before.step, before.phase
        self.armed: tuple[Fault, ...] = ()
        self._rank = rank
        self._slowed: dict[Fault, int] = {}  # the last step in which it was slow

    def note(self, phase: Phase, step: int | None = None) -> None:
        super().note(phase, step)
        if self.memory is None:  # a child of the rank
            return
        for fault in self._slowed:
            if fault.phase is phase and self._slowed[fault] < self.step:
                self._slowed[fault] = self.step
                inject(fault)
        for fault in self.armed:
            if fault.phase is phase and fault.step <= self.step and fault.concerns(self.rank):
                self._happen(fault)

    @property
    def rank(self) -> int:
        """Read when needed: a script may set the launcher's variables itself."""
        if self._rank is None:
            # In an elastic job ranks change, and a fault belongs to a slot; those of spares are beyond the world size.
            self._rank = int(os.environ["RANK"]) if in_elastic_job() else World.from_env().rank
        return self._rank

    def _happen(self, fault: Fault) -> None:
        self.armed = once_less(self.armed, fault)
        logger.warning("rank %d: injected fault: %s", self.rank, fault)
        report("fault", fault=str(fault))  # so that ranks started later do not repeat it
        if fault.kind == "slow":
            self._slowed[fault] = self.step
        inject(fault)


def arm(*faults: Fault | str, rank: int | None = None) -> None:
    """Make faults happen in this process when it reaches their step and place.

        paceline.faults.arm("kill rank=1 step=20")

    Call it on every rank alike, before or after the model is wrapped. `rank` is this process's rank, if the launcher's
    variables do not say so. Faults add up; `disarm()` removes those that have not happened.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise UsageError(f"rank must be a whole number of at least 0, got {rank!r}")
    chosen = tuple(fault if isinstance(fault, Fault) else parse(fault) for fault in faults)
    armed = own_progress()
    if not isinstance(armed, ArmedProgress):
        armed = ArmedProgress(armed, rank)
        armed.replace_own()
    armed.armed = (*armed.armed, *chosen)


def disarm() -> tuple[Fault, ...]:
    """Remove all faults of this process that have not happened, and return them."""
    armed = own_progress()
    if not isinstance(armed, ArmedProgress):
        return ()
    left, armed.armed = armed.armed, ()
    armed._slowed.clear()
    return left


def arm_from_environment() -> None:
    """Arm the faults in PACELINE_FAULTS.

    paceline's launcher leaves out faults that have happened. Under another one, which restarts ranks with the same
    variables, the number of restarts stands for how often a fault has happened.
    """
    faults = parse_all(os.environ[FAULTS_NAME])
    if REPORT_NAME not in os.environ:
        restarts = min(MOST_RESTARTS, Variables(os.environ).integer("TORCHELASTIC_RESTART_COUNT", 0))
        for _ in range(restarts):
            for fault in faults:
                faults = once_less(faults, fault)
    arm(*faults)
