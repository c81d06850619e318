"""One simulated job: it trains, saves, fails and recovers, from event to event.

Two ways to recover. RESTART: all ranks are started again and continue from the newest checkpoint. MEMORY: the survivors
form a new group and run the step again; only after failures that leave no rank whole do they restart. Failures are a
Poisson process whose rate does not depend on what the job does, so they also occur during a recovery, which then starts
over.
"""

import heapq
import math
import random
from dataclasses import dataclass
from enum import Enum

from paceline.simulate.assumptions import DAY_S, HOUR_S, SimulationSettings


class Way(Enum):
    """How a job recovers."""

    RESTART = "restart"
    MEMORY = "memory"


@dataclass(slots=True)
class Outcome:
    """How the time of one job was spent, in seconds."""

    wall_s: float = 0.0
    useful_s: float = 0.0  # of steps at full strength that were kept
    stalled_s: float = 0.0  # nothing ran
    redone_s: float = 0.0  # of steps that were lost
    saving_s: float = 0.0
    slower_s: float = 0.0  # time that missing ranks cost the others
    failures: int = 0

    @property
    def goodput(self) -> float:
        """The share of the time that was training, as if nothing had failed and nothing had to be saved."""
        return self.useful_s / self.wall_s


def simulate(settings: SimulationSettings, ranks: int, way: Way, seed: int) -> Outcome:
    """One job of `ranks` ranks."""
    return _Job(settings, ranks, way, random.Random(f"{settings.seed}/{ranks}/{seed}")).run()


def save_interval_s(settings: SimulationSettings, ranks: int, way: Way) -> float:
    """Seconds between two checkpoints. If not given, the first-order optimum (Young)."""
    if settings.save_every:
        return settings.save_every * 60
    rate = settings.failures_per_second(ranks) * (settings.all_fail if way is Way.MEMORY else 1.0)
    return max(settings.step, math.sqrt(2 * settings.save / rate)) if rate else math.inf


class _Job:
    def __init__(self, settings: SimulationSettings, ranks: int, way: Way, drawn: random.Random) -> None:
        self._settings, self._ranks, self._way, self._drawn = settings, ranks, way, drawn
        self._rate = settings.failures_per_second(ranks)
        self._interval = save_interval_s(settings, ranks, way)
        self._spares = int(ranks * settings.spares / 100) // settings.node  # nodes
        self._missing = 0  # nodes
        self._repairs: list[float] = []  # when nodes come back
        self._now = self._unsaved = 0.0
        self._next_failure = self._after(0.0)
        self._next_save = self._interval
        self._seen = Outcome()

    def run(self) -> Outcome:
        end = self._settings.days * DAY_S
        while self._now < end:
            repaired = self._repairs[0] if self._repairs else math.inf
            until = min(end, self._next_failure, self._next_save, repaired)
            self._train(max(0.0, until - self._now))  # a node may have been repaired while the job stood still
            if until == self._next_failure:
                self._fail()
            elif until == repaired:
                self._get_back()
            elif until == self._next_save:
                self._save()
        self._seen.wall_s = self._now
        return self._seen

    def _after(self, moment: float) -> float:
        """When the first failure after `moment` comes."""
        return moment + self._drawn.expovariate(self._rate) if self._rate else math.inf

    def _speed(self) -> float:
        """The share of full speed: the rank with the most lanes decides."""
        present = self._ranks - self._missing * self._settings.node
        lanes = self._settings.lanes_per_rank * self._ranks
        return self._settings.lanes_per_rank / math.ceil(lanes / max(1, present))

    def _train(self, seconds: float) -> None:
        useful = seconds * self._speed()
        self._seen.useful_s += useful
        self._seen.slower_s += seconds - useful
        self._unsaved += useful
        self._now += seconds

    def _save(self) -> None:
        """The checkpoint holds the state at its start; after a failure during the save it does not exist."""
        took = min(self._settings.save, self._next_failure - self._now)
        self._now += took
        self._seen.saving_s += took
        self._next_save = math.inf  # the failure sets it anew
        if took == self._settings.save:
            self._unsaved = 0.0
            self._next_save = self._now + self._interval

    def _fail(self) -> None:
        lost_all = self._break_node()
        lost = self._lose(lost_all)
        began, stall = self._now, self._stall(lost_all)
        while self._next_failure < self._now + stall:  # recovery starts over
            self._now = self._next_failure
            lost_all = self._break_node() or lost_all
            lost += self._lose(lost_all)
            stall = self._stall(lost_all)
        self._now += stall
        self._next_save = self._now + self._interval
        self._seen.stalled_s += self._now - began
        self._seen.redone_s += lost

    def _break_node(self) -> bool:
        """Returns True if no rank is intact any more."""
        self._seen.failures += 1
        self._next_failure = self._after(self._now)
        if self._spares:
            self._spares -= 1
        elif (self._missing + 1) * self._settings.node < self._ranks:
            self._missing += 1
        heapq.heappush(self._repairs, self._now + self._settings.repair * HOUR_S)
        return self._way is Way.RESTART or self._drawn.random() < self._settings.all_fail

    def _lose(self, lost_all: bool) -> float:
        """Drop what was trained since the last checkpoint, or the current step."""
        lost = self._unsaved if lost_all else min(self._unsaved, self._drawn.random() * self._settings.step)
        self._unsaved -= lost
        self._seen.useful_s -= lost
        return lost

    def _stall(self, lost_all: bool) -> float:
        settings = self._settings
        recovery = settings.restart if lost_all else settings.reform_s(self._ranks) + settings.heal
        return settings.detect + recovery

    def _get_back(self) -> None:
        """A node is repaired. It becomes a spare, or takes part again: in memory at once, else at the next restart."""
        heapq.heappop(self._repairs)
        if not self._missing:
            self._spares += 1
            return
        self._missing -= 1
        if self._way is Way.MEMORY:
            joins = min(self._settings.reform_s(self._ranks) + self._settings.heal, self._next_failure - self._now)
            self._now += joins
            self._seen.stalled_s += joins
