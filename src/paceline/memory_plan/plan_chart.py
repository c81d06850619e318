"""A plan as a bar chart. Drawing needs matplotlib; checking where a file goes needs nothing."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.memory_plan.numbers import show_bytes
from paceline.memory_plan.result import MemoryPlan, RankPlan

INK, FAINT, LIMIT = "#1d2433", "#6b7280", "#c1121f"
COLOURS = {
    "parameters": "#0b6e4f",
    "master": "#2a9d6f",
    "gradients": "#e09f3e",
    "m": "#3a6ea5",
    "v": "#6b9bc9",
    "activations": "#8d5a97",
    "logits and loss": "#c77dba",
}
OTHERS = ("#8d99ae", "#b8c0cc", "#5c677d", "#a3b18a", "#d4a373", "#7d8597")

PICTURES = (".png", ".svg", ".pdf")


def require_outputs(json: Path | None, png: Path | None) -> None:
    """Refuse files that could not be written, before any work."""
    if json is not None:
        _require_place("json", json)
    if png is not None:
        _require_picture("png", png)


def _require_place(name: str, file: Path) -> None:
    # A missing folder is a typo more often than not.
    if not file.parent.is_dir():
        raise UsageError(f"{name}={str(file)!r}: expected a file in an existing folder, but there is no {file.parent}")
    if file.is_dir():
        raise UsageError(f"{name}={str(file)!r}: expected a file, but this is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{name}={str(file)!r}: expected a writable file")


def _require_picture(name: str, file: Path) -> None:
    # The ending says how to draw it.
    if file.suffix.lower() not in PICTURES:
        raise UsageError(f"{name}={str(file)!r}: expected a file that ends in {', '.join(PICTURES)}")
    _require_place(name, file)
    if find_spec("matplotlib") is None:
        raise UsageError(f"{name}: a chart needs matplotlib, which is not installed: pip install 'paceline[bench]'")


def draw(plan: MemoryPlan, file: Path) -> None:
    """One bar per world size, divided into its lines, with the device's memory as a mark."""
    _require_picture("path", file)
    # Not pyplot: it keeps state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 2.4 + 0.55 * len(plan.by_ranks)
    figure = Figure(figsize=(9.0, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    model, _, settings = plan.subject.partition(", batch ")
    heading = f"{model}\n" + (f"batch {settings}" if settings else "")
    figure.text(0.015, 1 - 0.1 / height, heading, va="top", fontsize=10.5, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.5 / height, plan.convention.split(" (")[0], va="top", fontsize=7.5, color=FAINT)
    axes = figure.add_axes((0.10, 1.1 / height, 0.80, 1 - 1.95 / height))
    widest = max(item.total_with_outside for item in plan.by_ranks)
    unit, name = (2**30, "GiB") if widest >= 2**30 else (2**20, "MiB")
    colours = _colours(plan, widest)
    for place, item in enumerate(reversed(plan.by_ranks)):
        _bar(axes, place, item, colours, unit)
    _frame(axes, plan, widest, unit, name)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, ncols=5, fontsize=7.5, frameon=False, loc="lower left")
    figure.savefig(file)


def _colours(plan: MemoryPlan, widest: int) -> dict[str, str]:
    """Of every line that can be seen."""
    found: dict[str, str] = {}
    for item in plan.by_ranks:
        for line in (*item.peak.lines, *item.outside):
            if line.nbytes > widest / 500 and line.name not in found:
                taken = sum(name not in COLOURS for name in found)
                found[line.name] = COLOURS.get(line.name, OTHERS[taken % len(OTHERS)])
    return found


def _bar(axes: Any, place: int, item: RankPlan, colours: dict[str, str], unit: int) -> None:
    left = 0.0
    for line in (*item.peak.lines, *item.outside):
        axes.barh(place, line.nbytes / unit, left=left, height=0.62, color=colours.get(line.name, FAINT))
        left += line.nbytes / unit
    text = f"  {show_bytes(item.total_with_outside)}"
    axes.text(left, place, text, va="center", fontsize=9, color=INK)


def _frame(axes: Any, plan: MemoryPlan, widest: int, unit: int, name: str) -> None:
    if plan.device_bytes is not None and plan.device_bytes < 4 * widest:
        limit = plan.device_bytes / unit
        axes.axvline(limit, color=LIMIT, linewidth=1.4, linestyle=(0, (4, 3)))
        words = f"{show_bytes(plan.device_bytes)} "
        axes.text(limit, len(plan.by_ranks) - 0.5, words, color=LIMIT, fontsize=8, ha="right", va="bottom")
        widest = max(widest, plan.device_bytes)
    names = [f"{item.ranks} rank{'s' if item.ranks > 1 else ''}" for item in reversed(plan.by_ranks)]
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.12 * widest / unit)
    axes.set_ylim(-0.5, len(names) - 0.35)
    axes.set_xlabel(f"one rank at its highest, {name}", color=FAINT, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=FAINT, length=0, labelsize=8)
    axes.tick_params(axis="y", colors=INK, labelsize=10)
