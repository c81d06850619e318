"""The parts that charts of reports are made of. Needs matplotlib."""

from collections.abc import Iterable
from typing import Any

from paceline.bench.contenders import short_label

OURS, THEIRS, FLOOR = "#0b6e4f", "#8d99ae", "#c1121f"
INK, FAINT, PALE = "#1d2433", "#6b7280", "#e5e8ee"
OTHERS = ("#3a6ea5", "#e09f3e", "#8d5a97", "#8d99ae")


def new_figure(title: str, report: dict[str, Any], height: float, right: float, left: float = 0.12) -> tuple[Any, Any]:
    """A figure with a heading, and its axes."""
    # Not pyplot: it keeps state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.015, 1 - 0.13 / height, title, va="top", fontsize=12, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.38 / height, _machine(report), va="top", fontsize=8.5, color=FAINT)
    axes = figure.add_axes((left, 0.62 / height, right - left, 1 - 1.42 / height))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    return figure, axes


def _machine(report: dict[str, Any]) -> str:
    where = report["circumstances"]
    hardware, versions = where["hardware"], where["versions"]
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    software = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("torch", "paceline"))
    return f"{machine};  {software};  {where['date'][:10]}"


def colors(labels: Iterable[str]) -> dict[str, str]:
    """One color per label; ours is always the same."""
    found: dict[str, str] = {}
    for label in labels:
        others = [name for name in found if not name.startswith("paceline")]
        found.setdefault(label, OURS if label.startswith("paceline") else OTHERS[len(others) % len(OTHERS)])
    return found


def name_lines(axes: Any, ends: list[tuple[str, float, str]], gap: float = 0.05) -> None:
    """Write the names of lines (label, last y, color) at the right edge, pushed apart where they would touch."""
    axes.minorticks_off()
    axes.grid(axis="y", color=PALE, linewidth=0.9)
    axes.set_axisbelow(True)
    to_axes = axes.transData + axes.transAxes.inverted()
    lowest = -1.0
    for label, value, color in sorted(ends, key=lambda end: end[1]):
        y = max(to_axes.transform((1.0, value))[1], lowest + gap)
        lowest = y
        axes.text(
            1.015,
            y,
            short_label(label),
            transform=axes.transAxes,
            color=color,
            va="center",
            fontsize=10,
            fontweight="bold",
        )


def line_chart(title: str, report: dict[str, Any], lines: dict[str, Any], *, log: bool = False) -> tuple[Any, Any]:
    """A figure and its axes, with a line for each label through its points (x, y, low, high), and a band around it."""
    figure, axes = new_figure(title, report, 4.9, right=0.87)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    ends = []
    for label, color in colors(lines).items():
        x, y, low, high = zip(*lines[label], strict=True)
        color, style = (FLOOR, (0, (4, 3))) if label == "floor" else (color, "-")
        width = 2.4 if label == "paceline" else 1.5
        axes.plot(x, y, marker="o", markersize=4, color=color, linestyle=style, linewidth=width)
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        ends.append((label, y[-1], color))
    axes.set_xticks(sorted({point[0] for points in lines.values() for point in points}))
    name_lines(axes, ends)
    return figure, axes


def ratio_chart(title: str, report: dict[str, Any], bars: Any) -> Any:
    shown = [(label, ratio, allowed) for label, ratio, allowed in reversed(bars) if ratio]
    figure, axes = new_figure(title, report, 1.75 + 0.4 * max(2, len(shown)), right=0.86, left=0.26)
    for place, (_, ratio, allowed) in enumerate(shown):
        axes.barh(place, ratio["value"], height=0.6, color=OURS, alpha=0.9)
        axes.plot([ratio["low"], ratio["high"]], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt")
        text = f"{ratio['value']:.3f}" + (f"  (allowed {allowed:.2f})" if allowed else "")
        axes.text(ratio["high"], place, f"  {text}", va="center", fontsize=9, color=INK)
        if allowed:
            axes.plot([allowed, allowed], [place - 0.35, place + 0.35], color=FLOOR, linewidth=1.6)
    axes.axvline(1.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(shown)), [label for label, _, _ in shown], color=INK, fontsize=10)
    axes.set_xlabel("ratio of medians; line: 90 % of resamplings", color=FAINT, fontsize=9)
    return figure
