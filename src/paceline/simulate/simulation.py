"""The results of simulated jobs: figures, as text and for JSON."""

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from paceline.simulate.assumptions import HOUR_S, SimulationSettings, assumptions
from paceline.simulate.simulated_job import Outcome, Way, save_interval_s, simulate

NAMES = {Way.RESTART: "restart from checkpoint", Way.MEMORY: "recovery in memory"}


@dataclass(frozen=True, slots=True)
class WayResult:
    """All jobs of one number of ranks that recover in one way; times are shares of the whole."""

    goodput: float
    lowest: float  # of the jobs
    stalled: float
    redone: float
    saving: float
    slower: float
    lost_per_failure_s: float
    save_interval_s: float

    @classmethod
    def of(cls, jobs: list[Outcome], interval_s: float) -> "WayResult":
        wall = sum(job.wall_s for job in jobs)
        failures = sum(job.failures for job in jobs)
        return cls(
            goodput=fmean(job.goodput for job in jobs),
            lowest=min(job.goodput for job in jobs),
            stalled=sum(job.stalled_s for job in jobs) / wall,
            redone=sum(job.redone_s for job in jobs) / wall,
            saving=sum(job.saving_s for job in jobs) / wall,
            slower=sum(job.slower_s for job in jobs) / wall,
            lost_per_failure_s=(wall - sum(job.useful_s for job in jobs)) / failures if failures else 0.0,
            save_interval_s=interval_s,
        )


@dataclass(frozen=True, slots=True)
class SizeResult:
    """One number of ranks."""

    ranks: int
    between_failures_s: float | None  # None: there are none
    restart: WayResult
    memory: WayResult

    def way(self, way: Way) -> WayResult:
        return self.restart if way is Way.RESTART else self.memory


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result at all numbers of ranks."""

    settings: SimulationSettings
    sizes: tuple[SizeResult, ...]

    @classmethod
    def run(cls, settings: SimulationSettings) -> "Simulation":
        return cls(settings, tuple(_at(settings, ranks) for ranks in settings.sizes))

    def to_json(self) -> dict[str, Any]:
        sources = {name: source for name, _, source in assumptions(self.settings)}
        return {"settings": asdict(self.settings), "sources": sources, "sizes": [asdict(size) for size in self.sizes]}

    def __str__(self) -> str:
        head = f"{'ranks':>8}  {'a failure every':>15}  {'restart from checkpoint':>28}  {'recovery in memory':>28}"
        parts = f"{'goodput':>9}  {'lost per failure':>17}"
        lines = [head, f"{'':>8}  {'':>15}  {parts:>28}  {parts:>28}"]
        for size in self.sizes:
            every = "never" if size.between_failures_s is None else _shown(size.between_failures_s)
            both = [_figures(size.restart), _figures(size.memory)]
            lines.append(f"{size.ranks:>8,}  {every:>15}  {both[0]:>28}  {both[1]:>28}")
        settings = self.settings
        lines += ["", f"Goodput: the share of {settings.days:g} days that was training, of {settings.jobs} jobs each."]
        lines += ["", "This follows from:"]
        for name, value, source in assumptions(settings):
            lines.append(f"  --{name.replace('_', '-'):<16} {value:<8g} {source}")
        return "\n".join(lines)


def _at(settings: SimulationSettings, ranks: int) -> SizeResult:
    found = {
        way: WayResult.of(
            [simulate(settings, ranks, way, number) for number in range(settings.jobs)],
            save_interval_s(settings, ranks, way),
        )
        for way in Way
    }
    rate = settings.failures_per_second(ranks)
    return SizeResult(ranks, 1 / rate if rate else None, found[Way.RESTART], found[Way.MEMORY])


def _figures(found: WayResult) -> str:
    return f"{found.goodput:>9.1%}  {_shown(found.lost_per_failure_s):>17}"


def _shown(seconds: float) -> str:
    if seconds >= 48 * HOUR_S:
        return f"{seconds / HOUR_S / 24:.1f} days"
    if seconds >= 2 * HOUR_S:
        return f"{seconds / HOUR_S:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s"
