"""The result as a chart. Drawing needs matplotlib."""

from pathlib import Path

from paceline.simulate.simulated_job import Way
from paceline.simulate.simulation import NAMES, Simulation

INK, FAINT, PALE = "#1d2433", "#6b7280", "#e5e8ee"
COLOURS = {Way.MEMORY: "#0b6e4f", Way.RESTART: "#8d99ae"}


def draw(result: Simulation, file: Path) -> None:
    """Goodput by the number of ranks, one line for each way."""
    # Not pyplot: it keeps state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    settings = result.settings
    figure.text(0.015, 0.97, "Goodput, simulated", va="top", fontsize=12, fontweight="bold", color=INK)
    about = (
        f"{settings.failures:g} failures per 1,000 ranks and day, {settings.all_fail:.0%} of them of all ranks; "
        f"restart {settings.restart:g} s; in memory {settings.reform:g} s and {settings.reform_per_1000:g} s per 1,000"
    )
    figure.text(0.015, 0.91, about, va="top", fontsize=8, color=FAINT)
    axes = figure.add_axes((0.09, 0.13, 0.70, 0.70))
    ranks = [size.ranks for size in result.sizes]
    for way, colour in COLOURS.items():
        goodput = [100 * size.way(way).goodput for size in result.sizes]
        axes.plot(ranks, goodput, marker="o", markersize=4, color=colour, linewidth=2.2)
        axes.text(ranks[-1], goodput[-1], f"  {NAMES[way]}", color=colour, va="center", fontsize=10, fontweight="bold")
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.set_ylim(0, 103)
    axes.set_xlabel("ranks", color=FAINT, fontsize=9)
    axes.set_ylabel("% of the time", color=FAINT, fontsize=9)
    axes.grid(axis="y", color=PALE, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(file)
