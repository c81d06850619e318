"""Charts of the measurements that vary something."""

from typing import Any

from paceline.bench.chart import FAINT, FLOOR, INK, OURS, colours, name_lines, new_figure
from paceline.bench.spec import parse_bytes
from paceline.memory_plan.numbers import show_bytes


def series_chart(report: dict[str, Any]) -> Any:
    """Steps relative to torch's, by the value that varies."""
    spec, over = report["spec"], report["over"]
    title = f"{spec['model']}, micro-batch {spec['micro_batch']} on {spec['device']}: step relative to torch DDP"
    figure, axes = new_figure(title, report, 4.6, right=0.86)
    labels = [result["label"] for _, point in report["points"] for result in point["contenders"]]
    ends = []
    for label, colour in colours(labels).items():
        line = [
            (value, result["to_torch"])
            for value, point in report["points"]
            for result in point["contenders"]
            if result["label"] == label and result["to_torch"]
        ]
        if not line:
            continue
        colour = FLOOR if label == "floor" else colour
        values = [value for value, _ in line]
        ratios = [ratio["value"] for _, ratio in line]
        style = (0, (4, 3)) if label == "floor" else "-"
        axes.plot(values, ratios, marker="o", markersize=4, color=colour, linestyle=style, linewidth=2.0)
        low, high = ([ratio[key] for _, ratio in line] for key in ("low", "high"))
        axes.fill_between(values, low, high, color=colour, alpha=0.12, linewidth=0)
        ends.append((label, ratios[-1], colour))
    axes.set_xticks([value for value, _ in report["points"]])
    axes.set_xlabel(f"{over}; band: 90 % of resamplings", color=FAINT, fontsize=9)
    axes.set_ylabel("step / torch's step", color=FAINT, fontsize=9)
    name_lines(axes, ends)
    return figure


def lanes_chart(report: dict[str, Any]) -> Any:
    """A bar for each point: the step in lanes over the plain one, and what is allowed."""
    spec = report["spec"]
    title = f"{spec['model']}, micro-batch {spec['micro_batch']} on {spec['device']}: step in lanes / plain step"
    bars = [
        (f"{row['transport']}, {row['lanes']} lanes on {row['ranks']}", row["ratio"], row["allowed_ratio"])
        for row in report["rows"]
    ]
    return _ratio_chart(title, report, bars)


def agreement_chart(report: dict[str, Any]) -> Any:
    """The step with all checks over the step without."""
    spec = report["spec"]
    title = f"{spec['model']}, micro-batch {spec['micro_batch']}, {spec['ranks']} ranks: step with checks / without"
    return _ratio_chart(title, report, [("all checks", report["ratio"], report["allowed_ratio"])])


def _ratio_chart(title: str, report: dict[str, Any], bars: Any) -> Any:
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


def machinery_chart(report: dict[str, Any]) -> Any:
    """A step over the bare model's."""
    spec = report["spec"]
    how = ", compiled" if spec["compile"] else ""
    title = f"What the machinery adds to {spec['model']}, micro-batch {spec['micro_batch']}{how}, on {spec['device']}"
    bars = [(found["label"], found["to_bare"], None) for found in report["contenders"]]
    return _ratio_chart(title, report, bars)


def hooks_chart(report: dict[str, Any]) -> Any:
    """What is added to the bare model, by number of parameters."""
    figure, axes = new_figure("What the reducer adds to a step without an optimizer", report, 4.6, right=0.82)
    labels = [f"{row['label']}, {row['world']} rank{'s' if row['world'] > 1 else ''}" for row in report["rows"]]
    ends = []
    shades = ("-", (0, (4, 2)), (0, (1, 1)))
    worlds = sorted({row["world"] for row in report["rows"]})
    tint = colours(row["label"] for row in report["rows"])
    for label, row in zip(labels, report["rows"], strict=True):
        extra = [(m - b) * 1e3 for m, b in zip(row["median_s"], row["bare_s"], strict=True)]
        colour, style = tint[row["label"]], shades[worlds.index(row["world"]) % len(shades)]
        axes.plot(row["parameters"], extra, "o", markersize=4, color=colour)
        line = [(row["fixed_s"] + row["slope_s"] * count) * 1e3 for count in row["parameters"]]
        axes.plot(row["parameters"], line, color=colour, linestyle=style, linewidth=1.8)
        ends.append((f"{label}\n{row['slope_s'] * 1e6:.1f} µs each", line[-1], colour))
    axes.set_xlabel("parameters", color=FAINT, fontsize=9)
    axes.set_ylabel("added to the bare model, ms", color=FAINT, fontsize=9)
    axes.set_xlim(0, None)
    name_lines(axes, ends, gap=0.11)
    return figure


def cost_chart(report: dict[str, Any]) -> Any:
    """The forecast by number of ranks."""
    from matplotlib.ticker import FuncFormatter

    spec = report["spec"]
    size = show_bytes(parse_bytes(spec["gradient_bytes"]))
    title = f"All-reduce of {size}, modelled: {spec['ranks_per_host']} ranks a host, {spec['link_gbit']:g} Gbit/s links"
    figure, axes = new_figure(title, report, 4.8, right=0.82)
    ends = []
    names = [found["algorithm"] for found in report["forecast"]]
    for name, colour in colours(names).items():
        line = [found for found in report["forecast"] if found["algorithm"] == name]
        times = [found["seconds"] * 1e3 for found in line]
        colour = OURS if name == "two levels" else colour  # what paceline does across hosts
        axes.plot([found["ranks"] for found in line], times, marker="o", markersize=4, color=colour, linewidth=1.8)
        ends.append((name, times[-1], colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted({found["ranks"] for found in report["forecast"]}))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("ranks", color=FAINT, fontsize=9)
    axes.set_ylabel("ms", color=FAINT, fontsize=9)
    errors = ", ".join(
        f"{fit['label']} ({fit['algorithm']}) {fit['checked_error']:.0%}"
        for fit in report["fits"]
        if fit["checked_error"] is not None
    )
    axes.text(
        0.01,
        0.97,
        f"median error on points not fitted to: {errors}",
        transform=axes.transAxes,
        color=INK,
        fontsize=8.5,
        va="top",
    )
    name_lines(axes, ends)
    return figure
