"""A comparison of steps as a table and as a chart."""

from typing import Any

from paceline.bench.chart import FAINT, FLOOR, INK, OURS, THEIRS, new_figure
from paceline.bench.command import Command
from paceline.bench.contenders import short_label
from paceline.bench.spec import StepSpec
from paceline.bench.step_comparison import ContenderResult, StepComparison, run_steps
from paceline.bench.tables import (
    NOTHING,
    Columns,
    Table,
    failure_notes,
    ratio_columns,
    report_table,
    show,
    show_agreement,
    show_ms,
    show_ratio,
)
from paceline.memory_plan.numbers import show_bytes, show_count

STEP_COLUMNS: Columns = {
    "contender": lambda row: short_label(row.label),
    "step ms": lambda row: show_ms(row.median_s),
    "p10–p90": lambda row: f"{show_ms(row.p10_s)}–{show_ms(row.p90_s)}",
    **ratio_columns("× torch", "to_torch"),
    "× floor": lambda row: show_ratio(row.to_floor),
    "above floor ms": lambda row: show_ms(row.above_floor_s),
    "overlap": lambda row: show(row.overlap, ".0%"),
    "sent": lambda row: show_bytes(row.sent_bytes) if row.sent_bytes else NOTHING,
    "peak B/param": lambda row: show(row.peak_bytes_per_parameter, ".1f"),
    "same loss": lambda row: show_agreement(row, row.replicas_equal),
}


def step_tables(report: StepComparison) -> list[Table]:
    spec = report.spec
    title = _title(spec, report.parameters)
    title += f", {spec['threads']} thread{'s' if spec['threads'] > 1 else ''} per rank, {spec['steps']} steps"
    done = [result for result in report.contenders if result.state == "ok"]
    notes = failure_notes(report.contenders)
    for result in done:
        notes += [f"{short_label(result.label)}: {note}" for note in _details(result)]
    rounds = max((len(result.samples_s) for result in done), default=0)
    if rounds < len(done):
        notes.append(
            f"{rounds} rounds for {len(done)} contenders: not every contender ran at every position; increase --steps"
        )
    legend = {
        "step ms": "median time of one step on the slowest rank; p10–p90: its spread",
        "above floor": "step time minus that of `floor`, which does not synchronize",
        "overlap": "share of communication hidden behind compute: paceline's by its trace, others' by the floor "
        "and the same all-reduces run alone",
        "exposed": "communication during which a rank could only wait",
        "sent": "bytes that a rank sends per step, computed from the algorithm",
        "peak": "highest memory while training, above what the process held before the model was built",
        "same loss": "whether losses equal those of torch: exactly, or to the difference shown",
    }
    return report_table(report, title, STEP_COLUMNS, done, notes, legend)


def _details(result: ContenderResult) -> list[str]:
    notes = list(result.notes)
    if result.phases_s and result.label.startswith("paceline"):
        phases = ", ".join(f"{name} {show_ms(seconds)}" for name, seconds in result.phases_s.items())
        count = len(result.bucket_bytes)
        buckets = f"; {count} bucket{'' if count == 1 else 's'}" if count else ""  # another checkout does not say
        notes.append(f"{phases} ms{buckets}")
    if result.predicted_exposed_s is not None:
        traced = "" if result.traced_exposed_s is None else f", by trace {show_ms(result.traced_exposed_s)}"
        notes.append(f"exposed by plan {show_ms(result.predicted_exposed_s)}{traced} ms")
    return notes


def complaints(point: StepComparison, place: str) -> list[str]:
    """The contenders of one of many comparisons that have no result or differ from the others, and why."""
    notes = []
    for result in point.contenders:
        name = f"{short_label(result.label)}{place}"
        if result.state != "ok":
            notes.append(f"{name}: {result.state}: {result.message}")
        elif result.agrees is False:
            notes.append(f"{name}: its losses DIFFER by {result.loss_difference:.0e}")
    return notes


def step_chart(report: dict[str, Any]) -> Any:
    """Bars from the slowest to the fastest; the part beyond the floor has the full color."""
    results = [result for result in report["contenders"] if result["state"] == "ok"]
    floor = next((result["median_s"] * 1e3 for result in results if result["label"] == "floor"), None)
    bars = [result for result in results if result["label"] != "floor"]
    bars.sort(key=lambda result: result["median_s"], reverse=True)
    height = 1.75 + 0.4 * max(2, len(bars))
    left = 0.03 + 0.0085 * max([12, *(len(short_label(result["label"])) for result in bars)])
    figure, axes = new_figure(_title(report["spec"], report["parameters"]), report, height, right=0.66, left=left)
    slowest, reach = (max([result[key] * 1e3 for result in results], default=1.0) for key in ("median_s", "p90_s"))
    longest = min(reach, 1.25 * slowest)  # one wild step must not squeeze all bars
    for place, result in enumerate(bars):
        _bar(axes, place, result, floor)
    if floor is not None:
        axes.axvline(floor, color=FLOOR, linewidth=1.4, linestyle=(0, (4, 3)))
        edge = "right" if floor > longest / 2 else "left"
        text = f"no synchronization: {floor:.1f} ms"
        axes.text(floor, len(bars) - 0.3, text, color=FLOOR, fontsize=9, ha=edge, va="bottom")
    axes.set_yticks(range(len(bars)), [short_label(result["label"]) for result in bars], color=INK, fontsize=10)
    axes.set_xlim(0, longest * 1.03)
    axes.set_ylim(-0.5, len(bars) - 0.35)
    axes.set_xlabel("one training step, ms: median; line from p10 to p90", color=FAINT, fontsize=9)
    _columns(axes, bars)
    return figure


def _bar(axes: Any, place: int, result: dict[str, Any], floor: float | None) -> None:
    middle = result["median_s"] * 1e3
    color = OURS if result["label"].startswith("paceline") else THEIRS
    axes.barh(place, middle, height=0.6, color=color, alpha=0.3 if floor is not None else 0.9)
    if floor is not None and middle > floor:
        axes.barh(place, middle - floor, left=floor, height=0.6, color=color)
    low, high = result["p10_s"] * 1e3, result["p90_s"] * 1e3
    axes.plot([low, high], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt")


def _columns(axes: Any, bars: list[dict[str, Any]]) -> None:
    """The figures beside the bars, one column each."""
    places = (0.755, 0.86, 0.965)  # of the figure's width
    for x, name in zip(places, ("ms", "× torch", "× floor"), strict=True):
        _beside(axes, x, len(bars) - 0.3, name, FAINT, "normal")
    for place, result in enumerate(bars):
        ours = result["label"].startswith("paceline")
        middle = result["median_s"] * 1e3
        texts = [f"{middle:.1f}" if middle >= 10 else f"{middle:.2f}"]
        texts += [f"{result[key]['value']:.3f}" if result[key] else "–" for key in ("to_torch", "to_floor")]
        for x, text in zip(places, texts, strict=True):
            _beside(axes, x, place, text, OURS if ours else INK, "bold" if ours else "normal")
        if result["agrees"] is False:
            _beside(axes, 0.99, place, "✗", FLOOR, "bold")


def _beside(axes: Any, x: float, y: float, text: str, color: str, weight: str) -> None:
    from matplotlib.transforms import blended_transform_factory

    where = blended_transform_factory(axes.figure.transFigure, axes.transData)
    axes.text(x, y, text, transform=where, ha="right", va="center", color=color, fontsize=9.5, fontweight=weight)


def _title(spec: dict[str, Any], parameters: int) -> str:
    batch = f"microbatch of {spec['micro_batch']}" + (f" × {spec['accumulate']}" if spec["accumulate"] > 1 else "")
    model = f"{spec['model']} ({show_count(parameters)} parameters)"
    return f"{model}, {spec['ranks']} rank{'s' if spec['ranks'] > 1 else ''} on {spec['device']}, {batch}"


COMMAND = Command("step", "The same training step under each contender.", StepSpec, run_steps, step_tables, step_chart)
