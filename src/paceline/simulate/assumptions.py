"""The assumptions about a simulated job: its failures, and the cost of each way of recovery. Needs no torch.

`SOURCES` gives the source of every default; the command prints them.
"""

from dataclasses import dataclass, fields
from typing import Any

from paceline.memory_plan.numbers import PlanError, parse_list
from paceline.option import check_fields, option

DAY_S = 86_400.0
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """One simulated job, at several numbers of ranks."""

    ranks: str = option("1000,4000,16384,65536,100000", "numbers of ranks, comma-separated")
    days: float = option(30.0, "length of a job in days", low=0.01, high=3650.0)
    jobs: int = option(5, "jobs that are simulated at each number of ranks", low=1, high=10_000)
    seed: int = option(0, "seed of the failures", low=0)
    step: float = option(10.0, "seconds of a training step", low=1e-6, group="The job")
    lanes_per_rank: int = option(
        4,
        "lanes of the global batch for each rank: the fewer, the more a missing rank slows the others down",
        low=1,
        group="The job",
    )
    failures: float = option(0.47, "failures per 1,000 ranks and day", low=0.0, group="Failures")
    node: int = option(8, "ranks that one failure takes down", low=1, group="Failures")
    all_fail: float = option(
        0.13,
        "share of failures after which no rank is intact, such as bugs that hit all ranks",
        low=0.0,
        high=1.0,
        group="Failures",
    )
    detect: float = option(5.0, "seconds until a failure is detected", low=0.0, group="Failures")
    spares: float = option(1.0, "spare ranks, in percent", low=0.0, high=100.0, group="Failures")
    repair: float = option(24.0, "hours until a failed node returns", low=0.0, group="Failures")
    restart: float = option(
        600.0, "seconds from detection to the first step after a restart from a checkpoint", low=0.0, group="Restart"
    )
    save: float = option(5.0, "seconds for which a checkpoint stops the job", low=0.0, group="Restart")
    save_every: float = option(
        0.0, "minutes between checkpoints; 0: the best interval for each way", low=0.0, group="Restart"
    )
    reform: float = option(0.8, "seconds until the survivors have a new group", low=0.0, group="Recovery in memory")
    reform_per_1000: float = option(
        2.0, "additional seconds per 1,000 ranks of the group", low=0.0, group="Recovery in memory"
    )
    heal: float = option(6.0, "seconds until a spare has received the state", low=0.0, group="Recovery in memory")

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        if too_few := [ranks for ranks in self.sizes if ranks <= self.node]:
            raise PlanError(f"ranks={self.ranks!r}: expected more ranks than node={self.node}, got {too_few[0]}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return parse_list("ranks", self.ranks)

    def failures_per_second(self, ranks: int) -> float:
        return self.failures / 1000 * ranks / DAY_S

    def reform_s(self, ranks: int) -> float:
        return self.reform + self.reform_per_1000 * ranks / 1000


MEASURED = "measured on one H200, 3 ranks over NCCL"
SOURCES = {
    "failures": "published: Llama 3 405B, 419 unexpected interruptions in 54 days on 16,384 GPUs",
    "all_fail": "published: 54 of these 419 were software bugs, assumed to hit all ranks",
    "restart": "published: stalls of 10 minutes at O(100,000) GPUs (arXiv 2602.00277), 15-30 minutes (HyperPod)",
    "reform": f"{MEASURED}: a new group works 0.8 s after the abort",
    "reform_per_1000": "assumed: nothing of this size was measured",
    "detect": "assumed: a death is detected in 0.01 s, a frozen rank or host by its missing heartbeats",
    "heal": "assumed: 60 GiB of state per rank at 10 GiB/s",
    "step": "assumed",
    "lanes_per_rank": "assumed",
    "node": "assumed: the whole machine of the rank is taken out",
    "spares": "assumed",
    "repair": "assumed",
    "save": "assumed: a copy in memory, written in the background",
    "save_every": "computed: sqrt(2 x what a checkpoint costs x time between the failures that need one)",
}


def assumptions(settings: SimulationSettings) -> list[tuple[str, Any, str]]:
    """Name, value and source of every assumption. Values that the user gave are marked as such."""
    defaults = {item.name: item.default for item in fields(SimulationSettings)}
    return [
        (name, value, source if value == defaults[name] else "given")
        for name, source in SOURCES.items()
        for value in [getattr(settings, name)]
    ]
