"""What lanes cost beside the plain mode: python benchmarks/lanes_cost.py"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.chart import ratio_chart
from paceline.bench.command import Command, run_script
from paceline.bench.conductor import Log, no_log
from paceline.bench.results import BenchReport
from paceline.bench.series import circumstances_of, compare_each
from paceline.bench.spec import StepSpec, TrainingSpec
from paceline.bench.statistics import Ratio, ratio_of_medians
from paceline.bench.step_comparison import StepComparison
from paceline.bench.step_report import complaints
from paceline.bench.tables import NOTHING, Columns, Table, ratio_columns, report_table, setup_of, show_ms, verdict
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_list
from paceline.option import option

# The plain mode and lanes, by transport. On CPUs of one host, paceline itself chooses shm.
LANE_PAIRS = {
    "local": ("paceline", "lanes"),
    "shm": ("paceline", "lanes"),
    "torch": ("paceline-torch", "lanes-torch"),
}
# A step where every rank runs one lane, over the plain step.
ALLOWED_RATIO = {"shm": 1.05, "torch": 1.15}
COPIES_NOISE = 0.25  # of all gradients: memory of a process is not counted more exactly,
COUNTED_BYTES = 1 << 24  # nor for small models at all


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesSpec(TrainingSpec):
    """What lanes cost beside the plain mode for the same work: as many microbatches, accumulated on fewer ranks."""

    lanes: str = option("2,8", "numbers of lanes, comma-separated")
    ranks: str = option("1,2", "numbers of ranks, comma-separated; those that do not divide the lanes are left out")
    transport: tuple[str, ...] = option(
        ("shm", "torch"), "shm, torch or both; on cuda, and with one rank, there is only one choice"
    )
    steps: int = option(30, "timed steps of each contender at each point")

    def __post_init__(self) -> None:
        if not set(self.transport) <= ALLOWED_RATIO.keys():
            raise UsageError(f"transport={','.join(self.transport)}: expected shm, torch or both")
        for lanes, ranks in self.points():
            self.at(lanes, ranks)
        if not self.points():
            raise UsageError(
                f"lanes={self.lanes!r}, ranks={self.ranks!r}: the plain mode runs equally many microbatches on every "
                "rank, so expected a number of ranks that divides a number of lanes"
            )

    def points(self) -> list[tuple[int, int]]:
        """The pairs (lanes, ranks) that are compared."""
        many, worlds = parse_list("lanes", self.lanes), parse_list("ranks", self.ranks)
        return [(lanes, ranks) for lanes in many for ranks in worlds if lanes % ranks == 0]

    def transports(self, ranks: int) -> list[str]:
        """The transports that are compared with this number of ranks."""
        if ranks == 1:
            return ["local"]
        return ["torch"] if self.device == "cuda" else list(dict.fromkeys(self.transport))

    def at(self, lanes: int, ranks: int) -> StepSpec:
        """The comparison at one point."""
        labels = tuple(label for transport in self.transports(ranks) for label in LANE_PAIRS[transport])
        return self.step_spec(ranks=ranks, accumulate=lanes // ranks, contenders=labels)


@dataclass
class LanesRow:
    """Lanes beside the plain mode at the same number of microbatches."""

    transport: str
    lanes: int
    ranks: int
    plain_s: float
    lanes_s: float
    ratio: Ratio
    allowed_ratio: float | None  # where every rank runs one lane
    more_copies: float | None  # of all gradients, that lanes held at most beyond the plain mode
    allowed_copies: int


@dataclass
class LanesReport(BenchReport):
    rows: list[LanesRow]
    points: list[StepComparison]
    schema: str = "paceline-bench-lanes/1"


def run_lanes(spec: LanesSpec, log: Log = no_log) -> LanesReport:
    """Compare at each number of lanes and ranks."""
    names = [(f"{lanes} lanes, ranks: {ranks}", spec.at(lanes, ranks)) for lanes, ranks in spec.points()]
    return lanes_report(spec, compare_each(names, log))


def lanes_report(spec: LanesSpec, points: Sequence[StepComparison]) -> LanesReport:
    """The report on the comparisons at the points of `spec`."""
    rows = [
        _lanes_row(point, transport, lanes, ranks)
        for point, (lanes, ranks) in zip(points, spec.points(), strict=True)
        for transport in spec.transports(ranks)
    ]
    return LanesReport(asdict(spec), circumstances_of(points), [row for row in rows if row is not None], list(points))


def _lanes_row(point: StepComparison, transport: str, lanes: int, ranks: int) -> LanesRow | None:
    plain, ours = (point.result(label) for label in LANE_PAIRS[transport])
    if plain is None or ours is None or plain.median_s is None or ours.median_s is None:
        return None
    more = None
    if plain.peak_bytes is not None and ours.peak_bytes is not None and point.gradient_bytes >= COUNTED_BYTES:
        more = (ours.peak_bytes - plain.peak_bytes) / point.gradient_bytes
    return LanesRow(
        transport,
        lanes,
        ranks,
        plain.median_s,
        ours.median_s,
        ratio_of_medians(ours.samples_s, plain.samples_s),
        ALLOWED_RATIO[transport] if ranks == lanes and ranks > 1 else None,
        more,
        math.ceil(math.log2(lanes // ranks)),
    )


def lanes_tables(report: LanesReport) -> list[Table]:
    """One row per transport, number of lanes and number of ranks."""

    def allowed(row: LanesRow) -> str:
        if row.allowed_ratio is None:
            return NOTHING
        return f"{row.allowed_ratio:.2f} {verdict(row.ratio.value <= row.allowed_ratio)}"

    def copies(row: LanesRow) -> str:
        if row.more_copies is None:
            return NOTHING
        text = f"{row.more_copies:.2f} of {row.allowed_copies}"
        if row.transport == "torch" and report.spec["device"] != "cuda":  # gloo's own memory is in it
            return text
        return f"{text} {verdict(row.more_copies <= row.allowed_copies + COPIES_NOISE)}"

    columns: Columns = {
        "transport": lambda row: row.transport,
        "lanes": lambda row: str(row.lanes),
        "ranks": lambda row: str(row.ranks),
        "plain ms": lambda row: show_ms(row.plain_s),
        "lanes ms": lambda row: show_ms(row.lanes_s),
        **ratio_columns("× plain", "ratio"),
        "allowed": allowed,
        "more copies": copies,
    }
    notes = []
    for point in report.points:
        lanes = point.spec["ranks"] * point.spec["accumulate"]
        notes += complaints(point, f", {lanes} lanes on {point.spec['ranks']}")
    legend = {
        "plain": "the same microbatches, accumulated inside no_sync()",
        "allowed": "1.05 through shared memory and 1.15 through torch.distributed, where every rank runs one lane",
        "more copies": "peak memory above that of the plain mode, in copies of all gradients, of those allowed "
        f"(±{COPIES_NOISE}); with gloo it includes gloo's own memory, which depends on the bucket plan",
    }
    return report_table(
        report, f"{setup_of(report.spec)}: one training step in lanes", columns, report.rows, notes, legend
    )


def lanes_chart(report: dict[str, Any]) -> Any:
    """A bar for each point: the step in lanes over the plain one, and what is allowed."""
    title = f"{setup_of(report['spec'])}: step in lanes / plain step"
    bars = [
        (f"{row['transport']}, {row['lanes']} lanes on {row['ranks']}", row["ratio"], row["allowed_ratio"])
        for row in report["rows"]
    ]
    return ratio_chart(title, report, bars)


COMMAND = Command("lanes", "What lanes cost beside the plain mode.", LanesSpec, run_lanes, lanes_tables, lanes_chart)

if __name__ == "__main__":
    sys.exit(run_script(COMMAND, sys.argv[1:]))
