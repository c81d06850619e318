"""What ranks pay for checking each other in every step: python benchmarks/agreement_cost.py"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paceline.bench.chart import ratio_chart
from paceline.bench.command import Command, run_script
from paceline.bench.conductor import Log, no_log
from paceline.bench.results import BenchReport
from paceline.bench.series import circumstances_of, compare_each
from paceline.bench.spec import StepSpec, TrainingSpec
from paceline.bench.statistics import Ratio, Rounds, ratio_of_medians
from paceline.bench.step_comparison import StepComparison
from paceline.bench.step_report import complaints
from paceline.bench.tables import NOTHING, Table, report_table, setup_of, show_interval, show_ms, verdict
from paceline.option import check_fields, option

ALLOWED_CHECKS = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementSpec(TrainingSpec):
    """What ranks pay for checking each other in every step."""

    ranks: int = option(2, "ranks of each contender")
    steps: int = option(120, "timed steps of each contender at each start")
    starts: int = option(
        3, "how often all processes are started anew: the memory layout alone changes a step's time", low=1
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.each()

    def each(self) -> StepSpec:
        """The comparison of one start."""
        return self.step_spec(contenders=("no-agreement", "agreement"))


@dataclass
class AgreementReport(BenchReport):
    ratio: Ratio | None  # step with all checks / step without, over all starts; None if one of them failed
    by_start: list[float]
    allowed_ratio: float
    points: list[StepComparison]  # one per start
    schema: str = "paceline-bench-agreement/1"


def run_agreement(spec: AgreementSpec, log: Log = no_log) -> AgreementReport:
    """Compare several times, with processes started anew each time."""
    starts = [(f"start {number} of {spec.starts}", spec.each()) for number in range(1, spec.starts + 1)]
    return agreement_report(spec, compare_each(starts, log))


def agreement_report(spec: AgreementSpec, points: Sequence[StepComparison]) -> AgreementReport:
    """The report on the comparisons of all starts together."""
    pairs = [
        in_plain_units(checked.samples_s, plain.samples_s)
        for point in points
        if (checked := point.result("agreement")) and (plain := point.result("no-agreement"))
    ]
    ratio = None
    if pairs:
        ours, plain_rounds = ([turn for pair in pairs for turn in pair[side]] for side in (0, 1))
        ratio = ratio_of_medians(ours, plain_rounds)
    by_start = [ratio_of_medians(*pair).value for pair in pairs]
    return AgreementReport(asdict(spec), circumstances_of(points), ratio, by_start, ALLOWED_CHECKS, list(points))


def in_plain_units(ours: Rounds, plain: Rounds) -> tuple[Rounds, Rounds]:
    """Both in units of the plain median of their round: a machine that slows down meanwhile is no cost of ours."""
    units = [median(turn) for turn in plain]
    first, second = (
        [[sample / unit for sample in turn] for turn, unit in zip(side, units, strict=False)] for side in (ours, plain)
    )
    return first, second


def agreement_tables(report: AgreementReport) -> list[Table]:
    rows, notes = [], []
    for number, point in enumerate(report.points, start=1):
        both = [point.result(label) for label in ("no-agreement", "agreement")]
        times = [show_ms(found.median_s if found else None) for found in both]
        ratio = f"{report.by_start[number - 1]:.4f}" if number <= len(report.by_start) else NOTHING
        rows.append([f"start {number}", *times, ratio, NOTHING, NOTHING])
        notes += complaints(point, f", start {number}")
    if report.ratio is not None:
        met = f"{report.allowed_ratio:.2f} {verdict(report.ratio.value <= report.allowed_ratio)}"
        ratios = [f"{report.ratio.value:.4f}", show_interval(report.ratio, 3)]
        rows.append(["all", NOTHING, NOTHING, *ratios, met])
    legend = {
        "without": 'Agreement(state_every=0, not_finite="keep")',
        "with": 'Agreement(state_every=64, not_finite="skip")',
    }
    header = ("", "without ms", "with ms", "ratio", "(90 %)", "allowed")
    title = f"{setup_of(report.spec)}, {report.spec['ranks']} ranks: checks"
    return report_table(report, title, header, rows, notes, legend)


def agreement_chart(report: dict[str, Any]) -> Any:
    """The step with all checks over the step without."""
    title = f"{setup_of(report['spec'])}, {report['spec']['ranks']} ranks: step with checks / without"
    return ratio_chart(title, report, [("all checks", report["ratio"], report["allowed_ratio"])])


ABOUT = "What the checks between replicas cost."
COMMAND = Command("agreement", ABOUT, AgreementSpec, run_agreement, agreement_tables, agreement_chart)

if __name__ == "__main__":
    sys.exit(run_script(COMMAND, sys.argv[1:]))
