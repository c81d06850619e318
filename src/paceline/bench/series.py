"""`accumulate` and `ranks`: comparisons of steps at several values of one setting."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceline.bench.chart import FAINT, line_chart
from paceline.bench.command import Command
from paceline.bench.conductor import Log, no_log
from paceline.bench.contenders import short_label
from paceline.bench.results import BenchReport, Circumstances
from paceline.bench.spec import StepSpec, TrainingSpec
from paceline.bench.step_comparison import StepComparison, run_steps
from paceline.bench.step_report import complaints
from paceline.bench.tables import Table, report_table, setup_of, show_ms, show_ratio
from paceline.memory_plan.numbers import parse_list
from paceline.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSpec(TrainingSpec):
    """Training steps at several values of one setting, which each kind of series names."""

    over: ClassVar[str]

    values: str
    steps: int = option(12, "timed steps of each contender at each value", low=1)
    warmup: int = option(3, "untimed steps before the timed ones", low=0)
    contenders: tuple[str, ...] = option(("floor", "paceline", "torch"), "comma-separated, as for `step`")
    zero_grad: str = option("none", "what zero_grad sets gradients to: none or zero")

    def __post_init__(self) -> None:
        for value in parse_list("values", self.values):
            self.at(value)

    def at(self, value: int) -> StepSpec:
        """The comparison at one value."""
        return self.step_spec(**{self.over: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateSpec(SeriesSpec):
    """Training steps by the number of microbatches in a step."""

    over: ClassVar[str] = "accumulate"

    values: str = option("1,2,4,8", "microbatches per step, comma-separated")
    ranks: int = option(2, "ranks of each contender")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec(SeriesSpec):
    """Training steps by the number of ranks."""

    over: ClassVar[str] = "ranks"

    values: str = option("1,2,3,4,6,8", "numbers of ranks, comma-separated")
    accumulate: int = option(1, "microbatches per step")


@dataclass
class SeriesReport(BenchReport):
    over: str  # the setting's name
    points: list[tuple[int, StepComparison]]
    schema: str = "paceline-bench-series/1"


def run_series(spec: SeriesSpec, log: Log = no_log) -> SeriesReport:
    """Compare at each value of the setting that the series goes over."""
    values = parse_list("values", spec.values)
    points = compare_each([(f"{spec.over} = {value}", spec.at(value)) for value in values], log)
    return SeriesReport(asdict(spec), circumstances_of(points), spec.over, list(zip(values, points, strict=True)))


def compare_each(points: Sequence[tuple[str, StepSpec]], log: Log) -> list[StepComparison]:
    found = []
    for name, spec in points:
        log(name)
        found.append(run_steps(spec, log))
    return found


def circumstances_of(points: Sequence[StepComparison]) -> Circumstances:
    return Circumstances.now(next((point.circumstances.hardware["gpu"] for point in points), None))


def series_tables(report: SeriesReport) -> list[Table]:
    """One row per value, with the contenders side by side."""
    labels = list(dict.fromkeys(result.label for _, point in report.points for result in point.contenders))
    header = [report.over]
    for label in map(short_label, labels):
        header += [f"{label} ms"] + ([] if label == "torch" else [f"{label} × torch"])
    rows, notes = [], []
    for value, point in report.points:
        row = [str(value)]
        for label in labels:
            found = point.result(label)
            row.append(show_ms(found.median_s if found else None))
            if label != "torch":
                row.append(show_ratio(found.to_torch if found else None))
        rows.append(row)
        notes += complaints(point, f" at {value}")
    title = f"{setup_of(report.spec)}: one training step by {report.over}"
    return report_table(report, title, header, rows, notes)


def series_chart(report: dict[str, Any]) -> Any:
    """Steps relative to torch's, by the value that varies."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for value, point in report["points"]:
        for result in point["contenders"]:
            if ratio := result["to_torch"]:
                points = lines.setdefault(result["label"], [])
                points.append((value, ratio["value"], ratio["low"], ratio["high"]))
    figure, axes = line_chart(f"{setup_of(report['spec'])}: step relative to torch DDP", report, lines)
    axes.set_xlabel(f"{report['over']}; band: 90 % of resamplings", color=FAINT, fontsize=9)
    axes.set_ylabel("step / torch's step", color=FAINT, fontsize=9)
    return figure


ABOUT = "Training steps by the number of"
ACCUMULATE = Command("accumulate", f"{ABOUT} microbatches.", AccumulateSpec, run_series, series_tables, series_chart)
RANKS = Command("ranks", f"{ABOUT} ranks.", RanksSpec, run_series, series_tables, series_chart)
