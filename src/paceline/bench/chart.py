"""Reports as charts. Needs matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.bench.spec import show_count, show_ranks
from paceline.memory_plan.files import require_picture
from paceline.memory_plan.numbers import show_bytes

OURS, THEIRS, FLOOR = "#0b6e4f", "#8d99ae", "#c1121f"
INK, FAINT, PALE = "#1d2433", "#6b7280", "#e5e8ee"
OTHERS = ("#3a6ea5", "#e09f3e", "#8d5a97", "#8d99ae")


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw a report, as JSON holds it, into `file`."""
    require_picture("file", file)
    from paceline.bench import study_charts

    kind = report["schema"].split("/")[0].removeprefix("paceline-bench-")
    painters: dict[str, Callable[[dict[str, Any]], Any]] = {
        "step": step_chart,
        "allreduce": allreduce_chart,
        "series": study_charts.series_chart,
        "lanes": study_charts.lanes_chart,
        "agreement": study_charts.agreement_chart,
        "hooks": study_charts.hooks_chart,
        "machinery": study_charts.machinery_chart,
        "cost-model": study_charts.cost_chart,
    }
    figure = painters[kind](report)
    figure.savefig(file)


def new_figure(title: str, report: dict[str, Any], height: float, right: float, left: float = 0.12) -> tuple[Any, Any]:
    """A figure with a heading, and its axes."""
    # Not pyplot: it keeps state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.015, 1 - 0.13 / height, title, va="top", fontsize=12, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.38 / height, _place(report), va="top", fontsize=8.5, color=FAINT)
    axes = figure.add_axes((left, 0.62 / height, right - left, 1 - 1.42 / height))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    return figure, axes


def _place(report: dict[str, Any]) -> str:
    where = report["circumstances"]
    hardware, versions = where["hardware"], where["versions"]
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    software = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("torch", "paceline"))
    return f"{machine};  {software};  {where['date'][:10]}"


def step_chart(report: dict[str, Any]) -> Any:
    """Bars from the slowest to the fastest; what lies beyond the floor is strong."""
    results = [result for result in report["contenders"] if result["state"] == "ok"]
    floor = next((result["median_s"] * 1e3 for result in results if result["label"] == "floor"), None)
    bars = [result for result in results if result["label"] != "floor"]
    bars.sort(key=lambda result: result["median_s"], reverse=True)
    height = 1.75 + 0.4 * max(2, len(bars))
    left = 0.03 + 0.0085 * max([12, *(len(result["label"]) for result in bars)])
    figure, axes = new_figure(_step_title(report), report, height, right=0.66, left=left)
    slowest, reach = (max([result[key] * 1e3 for result in results], default=1.0) for key in ("median_s", "p90_s"))
    longest = min(reach, 1.25 * slowest)  # one wild step must not squeeze all bars
    for place, result in enumerate(bars):
        _bar(axes, place, result, floor)
    if floor is not None:
        axes.axvline(floor, color=FLOOR, linewidth=1.4, linestyle=(0, (4, 3)))
        edge = "right" if floor > longest / 2 else "left"
        text = f"no synchronisation: {floor:.1f} ms"
        axes.text(floor, len(bars) - 0.3, text, color=FLOOR, fontsize=9, ha=edge, va="bottom")
    axes.set_yticks(range(len(bars)), [result["label"] for result in bars], color=INK, fontsize=10)
    axes.set_xlim(0, longest * 1.03)
    axes.set_ylim(-0.5, len(bars) - 0.35)
    axes.set_xlabel("one training step, ms: median; line from p10 to p90", color=FAINT, fontsize=9)
    _columns(axes, bars)
    return figure


def _bar(axes: Any, place: int, result: dict[str, Any], floor: float | None) -> None:
    middle = result["median_s"] * 1e3
    colour = OURS if result["label"].startswith("paceline") else THEIRS
    axes.barh(place, middle, height=0.6, color=colour, alpha=0.3 if floor is not None else 0.9)
    if floor is not None and middle > floor:
        axes.barh(place, middle - floor, left=floor, height=0.6, color=colour)
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


def _beside(axes: Any, x: float, y: float, text: str, colour: str, weight: str) -> None:
    from matplotlib.transforms import blended_transform_factory

    where = blended_transform_factory(axes.figure.transFigure, axes.transData)
    axes.text(x, y, text, transform=where, ha="right", va="center", color=colour, fontsize=9.5, fontweight=weight)


def _step_title(report: dict[str, Any]) -> str:
    spec = report["spec"]
    micros = f"micro-batch {spec['micro_batch']}" + (f" × {spec['accumulate']}" if spec["accumulate"] > 1 else "")
    model = f"{spec['model']} ({show_count(report['parameters'])} parameters)"
    return f"{model}, {show_ranks(spec['ranks'])} on {spec['device']}, {micros}"


def allreduce_chart(report: dict[str, Any]) -> Any:
    """Bandwidth by size, one line each."""
    from matplotlib.ticker import FuncFormatter

    title = f"all-reduce of one float32 tensor over {report['spec']['ranks']} ranks"
    figure, axes = new_figure(title, report, 5.2, right=0.88)
    ends = []
    for label, colour in colours(row["label"] for row in report["rows"]).items():
        rows = [row for row in report["rows"] if row["label"] == label]
        sizes = [row["nbytes"] for row in rows]
        rates = [row["bytes_per_s"] / 1e9 for row in rows]
        axes.plot(sizes, rates, marker="o", markersize=4, color=colour, linewidth=2.4 if label == "paceline" else 1.5)
        low, high = ([row["nbytes"] / row[key] / 1e9 for row in rows] for key in ("p90_s", "p10_s"))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
        ends.append((label, rates[-1], colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["nbytes"] for row in report["rows"]}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("size / time, GB/s; band from p10 to p90", color=FAINT, fontsize=9)
    name_lines(axes, ends)
    return figure


def colours(labels: Any) -> dict[str, str]:
    """One colour per label; ours is always the same."""
    found: dict[str, str] = {}
    for label in labels:
        others = [name for name in found if not name.startswith("paceline")]
        found.setdefault(label, OURS if label.startswith("paceline") else OTHERS[len(others) % len(OTHERS)])
    return found


def name_lines(axes: Any, ends: list[tuple[str, float, str]], gap: float = 0.05) -> None:
    """Write the names of lines (label, last y, colour) at the right edge, pushed apart where they would touch."""
    axes.minorticks_off()
    axes.grid(axis="y", color=PALE, linewidth=0.9)
    axes.set_axisbelow(True)
    to_axes = axes.transData + axes.transAxes.inverted()
    lowest = -1.0
    for label, value, colour in sorted(ends, key=lambda end: end[1]):
        y = max(to_axes.transform((1.0, value))[1], lowest + gap)
        lowest = y
        axes.text(1.015, y, label, transform=axes.transAxes, color=colour, va="center", fontsize=10, fontweight="bold")
