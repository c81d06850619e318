"""Tables of the measurements that vary something: micros, ranks, parameters, and the cost model."""

from paceline.bench.hooks import TARGET_S
from paceline.bench.own_study import COPIES_NOISE
from paceline.bench.report import (
    AgreementReport,
    ContenderResult,
    CostModelReport,
    HooksReport,
    LanesReport,
    MachineryReport,
    MachineryResult,
    SeriesReport,
    StepReport,
)
from paceline.bench.spec import parse_bytes, show_count
from paceline.bench.tables import NOTHING, Table, show_ms, where
from paceline.memory_plan.numbers import show_bytes


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
        notes += [f"{result.label} at {value}: {words}" for result, words in _complaints(point)]
    spec = report.spec
    title = (
        f"{spec['model']}, micro-batch {spec['micro_batch']} on {spec['device']}: one training step by {report.over}"
    )
    return [Table(title, header, rows, [*notes, *where(report.circumstances)])]


def _complaints(point: StepReport) -> list[tuple[ContenderResult, str]]:
    """The contenders that have no result, or computed something else, and why."""
    found = []
    for result in point.contenders:
        if result.state != "ok":
            found.append((result, f"{result.state}: {result.message}"))
        elif result.agrees is False:
            found.append((result, f"its losses DIFFER by {result.loss_difference:.0e}"))
    return found


def lanes_tables(report: LanesReport) -> list[Table]:
    """One row per transport, number of lanes and number of ranks."""
    header = ("transport", "lanes", "ranks", "plain ms", "lanes ms", "× plain", "(90 %)", "allowed", "more copies")
    rows = []
    for row in report.rows:
        allowed, copies = NOTHING, NOTHING
        if row.allowed_ratio is not None:
            allowed = f"{row.allowed_ratio:.2f} {verdict(row.ratio.value <= row.allowed_ratio)}"
        if row.more_copies is not None:
            copies = f"{row.more_copies:.2f} of {row.allowed_copies}"
            if row.transport != "torch" or report.spec["device"] == "cuda":
                copies += f" {verdict(row.more_copies <= row.allowed_copies + COPIES_NOISE)}"
        ratio = [f"{row.ratio.value:.3f}", f"{row.ratio.low:.2f}–{row.ratio.high:.2f}"]
        place = [row.transport, str(row.lanes), str(row.ranks)]
        rows.append([*place, show_ms(row.plain_s), show_ms(row.lanes_s), *ratio, allowed, copies])
    notes = []
    for point in report.points:
        where_it_was = f"{point.spec['ranks'] * point.spec['accumulate']} lanes on {point.spec['ranks']}"
        notes += [f"{result.label}, {where_it_was}: {words}" for result, words in _complaints(point)]
    notes.append(
        "plain: the same micros, accumulated inside no_sync(). allowed: 1.05 through shared memory and 1.15 through "
        "torch.distributed, where every rank runs one lane. more copies: peak memory above the plain mode's, in copies "
        f"of all gradients, and how many are allowed, give or take {COPIES_NOISE}; gloo's own memory, which differs "
        "from one bucket plan to the next, is in it."
    )
    spec = report.spec
    title = f"{spec['model']}, micro-batch {spec['micro_batch']} on {spec['device']}: one training step in lanes"
    return [Table(title, header, rows, [*notes, *where(report.circumstances)])]


def agreement_tables(report: AgreementReport) -> list[Table]:
    spec, ratio = report.spec, report.ratio
    rows = []
    for number, point in enumerate(report.points, start=1):
        both = [point.result(label) for label in ("no-agreement", "agreement")]
        times = [show_ms(found.median_s if found else None) for found in both]
        rows.append([f"start {number}", *times, NOTHING, NOTHING, NOTHING])
    for row, value in zip(rows, report.by_start, strict=False):
        row[3] = f"{value:.4f}"
    if ratio is not None:
        met = f"{report.allowed_ratio:.2f} {verdict(ratio.value <= report.allowed_ratio)}"
        rows.append(["all", NOTHING, NOTHING, f"{ratio.value:.4f}", f"{ratio.low:.3f}–{ratio.high:.3f}", met])
    notes = [
        f"{result.label}, start {number}: {words}"
        for number, point in enumerate(report.points, start=1)
        for result, words in _complaints(point)
    ]
    notes.append(
        'with: Agreement(state_every=64, not_finite="skip"); without: Agreement(state_every=0, not_finite="keep")'
    )
    title = f"{spec['model']}, micro-batch {spec['micro_batch']}, {spec['ranks']} ranks on {spec['device']}: checks"
    header = ("", "without ms", "with ms", "ratio", "(90 %)", "allowed")
    return [Table(title, header, rows, [*notes, *where(report.circumstances)])]


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"


def hooks_tables(report: HooksReport) -> list[Table]:
    header = ["contender", "ranks", "µs/parameter", "fixed ms", f"target {TARGET_S * 1e6:g} µs"]
    most = max((row.parameters[-1] for row in report.rows), default=0)
    header += [f"step of {most:,} ms", "µs each", "× torch", "(90 %)"]
    rows = [
        [
            row.label,
            str(row.world),
            f"{row.slope_s * 1e6:.2f}",
            f"{row.fixed_s * 1e3:.3f}",
            verdict(row.slope_s <= TARGET_S),
            show_ms(row.median_s[-1]),
            f"{(row.median_s[-1] - row.bare_s[-1]) / row.parameters[-1] * 1e6:.2f}",
            f"{row.to_torch.value:.3f}" if row.to_torch else NOTHING,
            f"{row.to_torch.low:.2f}–{row.to_torch.high:.2f}" if row.to_torch else NOTHING,
        ]
        for row in report.rows
    ]
    notes = [f"{label}: failed: {message}" for label, message in report.failures.items()]
    notes.append(
        "time of zero_grad, forward and backward above the bare model's, over "
        f"{report.spec['parameters']} parameters of {report.spec['numel']} elements: "
        "the slope (median of pairwise slopes), and what is left at zero parameters; then, with most parameters, the "
        "whole step, what each parameter adds to the bare model's, and the ratio to torch's step"
    )
    return [
        Table(
            "what the reducer adds to a step without an optimizer", header, rows, [*notes, *where(report.circumstances)]
        )
    ]


def machinery_tables(report: MachineryReport) -> list[Table]:
    """One row per contender. `bare (A/A)` is the same program as `bare`, so its ratio shows the noise."""
    header = ("contender", "step ms", "p10–p90", "× bare", "(90 %)", "µs/tensor", "same loss")
    notes = []
    for result in report.contenders:
        if result.state != "ok":
            notes.append(f"{result.label}: {result.state}: {result.message}")
            notes += [f"    | {line}" for line in result.log.splitlines()]
    notes.append(
        "One rank does everything that it would do among several, over a group of its own, so what it adds to the "
        "bare model is machinery alone. p10–p90: over turns; a turn is one burst with one synchronisation at its end. "
        "µs/tensor: the added time divided by the number of parameter tensors. "
        "(90 %): where the ratio lies in 9 of 10 resamplings of the rounds."
    )
    spec = report.spec
    parts = [
        spec["model"],
        f"{show_count(report.parameters)} parameters in {report.tensors} tensors",
        f"micro-batch {spec['micro_batch']}{', compiled' if spec['compile'] else ''} on {spec['device']}",
        f"backend {spec['backend']}",
        f"{spec['rounds']} rounds of {spec['burst']} steps",
    ]
    rows = [_machinery_row(result) for result in report.contenders if result.state == "ok"]
    return [Table(", ".join(parts), header, rows, [*notes, *where(report.circumstances)])]


def _machinery_row(result: MachineryResult) -> list[str]:
    assert result.median_s is not None and result.p10_s is not None and result.p90_s is not None
    low, middle, high = (f"{seconds * 1e3:.2f}" for seconds in (result.p10_s, result.median_s, result.p90_s))
    row = [result.label, middle, f"{low}–{high}"]
    if result.to_bare is None or result.added_per_tensor_s is None or result.loss_difference is None:
        return [*row, *[NOTHING] * 4]
    ratio, difference = result.to_bare, result.loss_difference
    same = "yes" if not difference else f"to {difference:.0e}" if result.agrees else f"NO ({difference:.0e})"
    added = f"{result.added_per_tensor_s * 1e6:.1f}"
    return [*row, f"{ratio.value:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", added, same]


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
