"""Tables of the measurements that vary something: micros, ranks, parameters, and the cost model."""

from paceline.bench.hooks import TARGET_S
from paceline.bench.report import CostModelReport, HooksReport, SeriesReport
from paceline.bench.spec import parse_bytes, show_bytes
from paceline.bench.tables import NOTHING, Table, show_ms, where


def series_tables(report: SeriesReport) -> list[Table]:
    """One row per value, with the contenders side by side."""
    labels = list(dict.fromkeys(result.label for _, point in report.points for result in point.contenders))
    header = [report.over]
    for label in labels:
        header += [f"{label} ms"] + ([] if label == "torch" else [f"{label} × torch"])
    rows, notes = [], []
    for value, point in report.points:
        row = [str(value)]
        for label in labels:
            found = point.result(label)
            row.append(show_ms(found.median_s if found else None))
            if label != "torch":
                row.append(f"{found.to_torch.value:.3f}" if found and found.to_torch else NOTHING)
        rows.append(row)
        for result in point.contenders:
            if result.state != "ok":
                notes.append(f"{result.label} at {value}: {result.state}: {result.message}")
            elif result.agrees is False:
                notes.append(f"{result.label} at {value}: its losses DIFFER by {result.loss_difference:.0e}")
    spec = report.spec
    title = (
        f"{spec['model']}, micro-batch {spec['micro_batch']} on {spec['device']}: one training step by {report.over}"
    )
    return [Table(title, header, rows, [*notes, *where(report.circumstances)])]


def hooks_tables(report: HooksReport) -> list[Table]:
    header = ["contender", "ranks", "µs/parameter", "fixed ms", f"target {TARGET_S * 1e6:g} µs"]
    rows = [
        [
            row.label,
            str(row.world),
            f"{row.slope_s * 1e6:.2f}",
            f"{row.fixed_s * 1e3:.3f}",
            "met" if row.slope_s <= TARGET_S else "NOT met",
        ]
        for row in report.rows
    ]
    notes = [f"{label}: failed: {message}" for label, message in report.failures.items()]
    notes.append(
        "time of zero_grad, forward and backward above the bare model's, over "
        f"{report.spec['parameters']} parameters of {report.spec['numel']} elements: "
        "the slope (median of pairwise slopes), and what is left at zero parameters"
    )
    return [
        Table(
            "what the reducer adds to a step without an optimizer", header, rows, [*notes, *where(report.circumstances)]
        )
    ]


def cost_tables(report: CostModelReport) -> list[Table]:
    """The fits, the check, and the forecast."""
    fits = [
        [
            fit.label,
            fit.algorithm,
            f"{fit.alpha_s * 1e6:.1f}",
            f"{1e-9 / fit.beta_s_per_byte:.2f}" if fit.beta_s_per_byte else NOTHING,
            f"{fit.fitted_error:.0%}",
            NOTHING if fit.checked_error is None else f"{fit.checked_error:.0%}",
        ]
        for fit in report.fits
    ]
    fit_table = Table(
        "all-reduce: T = α · messages + β · bytes, fitted here",
        ("contender", "algorithm", "α µs", "1/β GB/s", "error, fitted", "error, others"),
        fits,
        ["errors: median of |predicted / measured − 1|"],
    )
    points = [
        [
            point.label,
            str(point.ranks),
            show_bytes(point.nbytes),
            f"{point.measured_s * 1e3:.3f}",
            f"{point.predicted_s * 1e3:.3f}",
            f"{point.predicted_s / point.measured_s:.2f}",
            "fitted" if point.fitted else "checked",
        ]
        for point in report.points
    ]
    point_table = Table(
        "measured and predicted", ("contender", "ranks", "size", "measured ms", "predicted ms", "ratio", ""), points
    )
    return [fit_table, point_table, *_forecast_tables(report)]


def _forecast_tables(report: CostModelReport) -> list[Table]:
    names = list(dict.fromkeys(found.algorithm for found in report.forecast))
    times, efforts = [], []
    for ranks in dict.fromkeys(found.ranks for found in report.forecast):
        costs = {found.algorithm: found for found in report.forecast if found.ranks == ranks}
        times.append([f"{ranks:,}", *(show_ms(costs[name].seconds) for name in names)])
        effort = [f"{costs[name].messages:,.0f}, {show_bytes(costs[name].sent_bytes)}" for name in names]
        efforts.append([f"{ranks:,}", *effort])
    size = show_bytes(parse_bytes(report.spec["gradient_bytes"]))
    assumed = [f"assumed: {text}" for text in report.assumptions]
    return [
        Table(f"forecast: all-reduce of {size}, ms", ("ranks", *names), times),
        Table(
            "messages that follow one another, and bytes that a rank sends",
            ("ranks", *names),
            efforts,
            [*assumed, *where(report.circumstances)],
        ),
    ]
