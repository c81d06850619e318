"""What audits of lanes cost: python benchmarks/audits_cost.py

Every step is audited, so that a step shows what one audit costs; with audit_every=K a run pays that every K steps.
"""

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
from paceline.bench.tables import Columns, Table, ratio_columns, report_table, setup_of, show_ms
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_list
from paceline.option import option

PLAIN, AUDITED = "lanes", "lanes-audited"
EVERY = 100  # steps between audits, for which the cost of a run is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditsSpec(TrainingSpec):
    """What an audit adds to a step in lanes."""

    lanes: str = option("4,8", "numbers of lanes, comma-separated")
    ranks: int = option(2, "ranks of each contender; all numbers of lanes must be multiples of it", low=2)
    steps: int = option(30, "timed steps of each contender at each point")

    def __post_init__(self) -> None:
        for lanes in self.points():
            if lanes % self.ranks:
                raise UsageError(f"lanes={self.lanes!r}: expected multiples of ranks={self.ranks}, got {lanes}")
            self.at(lanes)

    def points(self) -> tuple[int, ...]:
        return parse_list("lanes", self.lanes)

    def at(self, lanes: int) -> StepSpec:
        """The comparison with so many lanes."""
        return self.step_spec(ranks=self.ranks, accumulate=lanes // self.ranks, contenders=(PLAIN, AUDITED))


@dataclass
class AuditsRow:
    """A step with an audit beside one without."""

    lanes: int
    ranks: int
    plain_s: float
    audited_s: float
    ratio: Ratio
    of_a_lane: float  # what the audit adds, in units of one lane's share of the plain step
    ratio_of_run: float  # with audit_every=EVERY


@dataclass
class AuditsReport(BenchReport):
    rows: list[AuditsRow]
    points: list[StepComparison]
    schema: str = "paceline-bench-audits/1"


def run_audits(spec: AuditsSpec, log: Log = no_log) -> AuditsReport:
    """Compare with each number of lanes."""
    return audits_report(spec, compare_each([(f"{lanes} lanes", spec.at(lanes)) for lanes in spec.points()], log))


def audits_report(spec: AuditsSpec, points: Sequence[StepComparison]) -> AuditsReport:
    rows = [_row(point, lanes, spec.ranks) for point, lanes in zip(points, spec.points(), strict=True)]
    return AuditsReport(asdict(spec), circumstances_of(points), [row for row in rows if row is not None], list(points))


def _row(point: StepComparison, lanes: int, ranks: int) -> AuditsRow | None:
    plain, audited = point.result(PLAIN), point.result(AUDITED)
    if plain is None or audited is None or plain.median_s is None or audited.median_s is None:
        return None
    ratio = ratio_of_medians(audited.samples_s, plain.samples_s)
    added = ratio.value - 1
    return AuditsRow(
        lanes,
        ranks,
        plain.median_s,
        audited.median_s,
        ratio,
        of_a_lane=added * (lanes // ranks),
        ratio_of_run=1 + added / EVERY,
    )


def audits_tables(report: AuditsReport) -> list[Table]:
    """One row per number of lanes."""
    columns: Columns = {
        "lanes": lambda row: str(row.lanes),
        "ranks": lambda row: str(row.ranks),
        "plain ms": lambda row: show_ms(row.plain_s),
        "audited ms": lambda row: show_ms(row.audited_s),
        **ratio_columns("× plain", "ratio"),
        "of a lane": lambda row: f"{row.of_a_lane:.2f}",
        f"every {EVERY}": lambda row: f"{row.ratio_of_run:.4f}",
    }
    notes = [note for point in report.points for note in complaints(point, f", {point.spec['accumulate']} per rank")]
    legend = {
        "audited": "Agreement(audit_every=1): one lane of every step is computed by two ranks",
        "of a lane": "what the audit adds, in units of the plain step divided by the lanes of a rank: 1 is the lane "
        "itself, what is above it the comparison",
        f"every {EVERY}": f"the whole run with audit_every={EVERY} over one without audits",
    }
    return report_table(report, f"{setup_of(report.spec)}: one step with an audit", columns, report.rows, notes, legend)


def audits_chart(report: dict[str, Any]) -> Any:
    """A bar for each number of lanes: the step with an audit over the plain one."""
    bars = [(f"{row['lanes']} lanes on {row['ranks']}", row["ratio"], None) for row in report["rows"]]
    return ratio_chart(f"{setup_of(report['spec'])}: step with an audit / without", report, bars)


COMMAND = Command("audits", "What audits of lanes cost.", AuditsSpec, run_audits, audits_tables, audits_chart)

if __name__ == "__main__":
    sys.exit(run_script(COMMAND, sys.argv[1:]))
