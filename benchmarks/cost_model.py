"""A model of all-reduce: fitted to points measured here, checked against others, and extrapolated to 10,000 ranks.

python benchmarks/cost_model.py --json benchmarks/<date>-<hardware>-cost-model.json --png chart.png
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.allreduce_model import (
    FORECASTS,
    RING,
    SHARED_MEMORY,
    Algorithm,
    Hosts,
    Link,
    crowding,
    fit_two,
    seconds,
)
from paceline.bench.allreduce import AllReduceSpec, run_allreduce
from paceline.bench.chart import FAINT, INK, OURS, colors, name_lines, new_figure
from paceline.bench.command import Command, run_script
from paceline.bench.conductor import Log, no_log
from paceline.bench.results import BenchReport, Circumstances
from paceline.bench.spec import parse_sizes
from paceline.bench.tables import NOTHING, Table, show_ms, where
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_bytes, parse_list, show_bytes
from paceline.option import check_fields, option

FORECAST_RANKS = (8, 16, 64, 256, 1024, 4096, 10_000)
Measured = dict[str, list[tuple[int, int, float]]]  # contender: (ranks, bytes, seconds)


@dataclass(frozen=True, slots=True)
class CostModelSpec:
    """A model of all-reduce, fitted to measured points, checked against others, and extrapolated to many ranks."""

    fit_ranks: str = option("2,4", "numbers of ranks that the model is fitted to")
    check_ranks: str = option("3,6,8", "numbers of ranks that it is checked against")
    sizes: str = option("16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "sizes; the model is fitted to every second one")
    rounds: int = option(4, "turns at every size", low=1)
    gradient_bytes: str = option("128MiB", "size of the reduced buffer in the forecast")
    ranks_per_host: int = option(8, "ranks per host in the forecast", low=1)
    link_gbit: float = option(100.0, "assumed speed of a host's link, Gbit/s", low=0.001)
    link_latency_us: float = option(10.0, "assumed time of one message between hosts, µs", low=0.001)
    timeout: float = option(120.0, "seconds without an answer after which a contender is dropped", low=1)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("fit_ranks", "check_ranks"):
            text = getattr(self, name)
            if min(parse_list(name, text)) < 2:
                raise UsageError(f"{name}={text!r}: an all-reduce needs 2 ranks or more")
        if len(parse_sizes(self.sizes)) < 3:
            raise UsageError(f"expected three sizes or more, got {self.sizes!r}")
        parse_bytes("gradient_bytes", self.gradient_bytes)


@dataclass
class CostFit:
    """T = α·messages + β·bytes for one contender under one algorithm."""

    label: str
    algorithm: str
    alpha_s: float
    beta_s_per_byte: float
    fitted_error: float  # median |predicted / measured − 1|
    checked_error: float | None  # of the points it was not fitted to


@dataclass
class CostPoint:
    """One measured point beside what the model says."""

    label: str
    ranks: int
    nbytes: int
    measured_s: float
    predicted_s: float
    fitted: bool


@dataclass
class Forecast:
    """One algorithm at one number of ranks."""

    algorithm: str
    ranks: int
    seconds: float
    messages: float  # one after another
    sent_bytes: float  # per rank


@dataclass
class CostModelReport(BenchReport):
    """All that the study found."""

    fits: list[CostFit]
    points: list[CostPoint]
    forecast: list[Forecast]
    assumptions: list[str]
    schema: str = "paceline-bench-cost-model/1"


def run_cost_model(spec: CostModelSpec, log: Log = no_log) -> CostModelReport:
    """Measure, fit, check, forecast."""
    measured: Measured = {}
    transport = ""
    for ranks in (*parse_list("fit_ranks", spec.fit_ranks), *parse_list("check_ranks", spec.check_ranks)):
        log(f"all-reduces over {ranks} ranks")
        wanted = AllReduceSpec(
            sizes=spec.sizes, ranks=ranks, rounds=spec.rounds, contenders=("paceline", "gloo"), timeout=spec.timeout
        )
        report = run_allreduce(wanted, log)
        transport = report.transport
        for row in report.rows:
            measured.setdefault(row.label, []).append((ranks, row.nbytes, row.median_s))
    shared = transport.lower().startswith("shm")
    algorithms = {"gloo": RING, "paceline": SHARED_MEMORY if shared else RING}
    cores = len(os.sched_getaffinity(0))
    fits, points, links = [], [], {}
    for label, found in measured.items():
        for crowded in (True, False):
            part = [point for point in found if (point[0] > cores) is crowded]
            if not set(parse_list("fit_ranks", spec.fit_ranks)) & {ranks for ranks, _, _ in part}:
                continue
            name = f"{label}, ranks > cores" if crowded else label
            fit, its_points = fit_contender(name, algorithms[label], part, spec, cores)
            links[label] = Link(fit.alpha_s, fit.beta_s_per_byte)  # of the last one: a core for every rank
            fits.append(fit)
            points += its_points
    inside = links.get("paceline") or links["gloo"]
    assumptions = _assumptions(spec, cores, transport)
    return CostModelReport(asdict(spec), Circumstances.now(), fits, points, forecast(spec, inside), assumptions)


def fit_contender(
    label: str, algorithm: Algorithm, measured: list[tuple[int, int, float]], spec: CostModelSpec, cores: int
) -> tuple[CostFit, list[CostPoint]]:
    """Fit to the points that the spec names, and predict all of them."""
    sizes = set(parse_sizes(spec.sizes)[::2])
    ranks_of_fit = set(parse_list("fit_ranks", spec.fit_ranks))
    rows = []
    for ranks, nbytes, took in measured:
        if ranks in ranks_of_fit and nbytes in sizes:
            crowd = crowding(ranks, cores)
            rows.append((algorithm.messages(ranks), crowd * algorithm.share(ranks) * nbytes, took))
    link = Link(*fit_two(rows))
    points = [
        CostPoint(
            label,
            ranks,
            nbytes,
            took,
            seconds(algorithm, link, ranks, nbytes, crowding(ranks, cores)),
            ranks in ranks_of_fit and nbytes in sizes,
        )
        for ranks, nbytes, took in measured
    ]
    errors = {
        fitted: [abs(p.predicted_s / p.measured_s - 1) for p in points if p.fitted is fitted]
        for fitted in (True, False)
    }
    checked = median(errors[False]) if errors[False] else None
    return CostFit(label, algorithm.name, link.alpha_s, link.beta_s_per_byte, median(errors[True]), checked), points


def forecast(spec: CostModelSpec, inside: Link) -> list[Forecast]:
    """Each algorithm at each number of ranks, over hosts with the assumed link."""
    nbytes = parse_bytes("gradient_bytes", spec.gradient_bytes)
    network = Link(spec.link_latency_us / 1e6, 8 / (spec.link_gbit * 1e9))
    found = []
    for ranks in FORECAST_RANKS:
        hosts = Hosts(ranks, spec.ranks_per_host, inside, network)
        for name, cost_of in FORECASTS.items():
            cost = cost_of(hosts, nbytes)
            found.append(Forecast(name, ranks, cost.seconds, cost.messages, cost.sent_bytes))
    return found


def _assumptions(spec: CostModelSpec, cores: int, transport: str) -> list[str]:
    fitted = f"α and β of a contender are fitted to {spec.fit_ranks} ranks and every second size, checked on the others"
    link = f"{spec.link_gbit:g} Gbit/s and {spec.link_latency_us:g} µs per message"
    return [
        f"paceline moved bytes through {transport}; {fitted}",
        f"ranks beyond this machine's {cores} cores take turns: bytes take ranks / cores as long, α is fitted anew",
        f"between hosts nothing was measured: {link} for every host, full duplex, switches without contention",
        f"{spec.ranks_per_host} ranks a host, each with a core of its own; inside a host paceline's fit is used",
        "adding up is part of β; stragglers, failures and software that slows with the number of ranks are left out",
    ]


# ---- tables and chart


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
    size = show_bytes(parse_bytes("gradient_bytes", report.spec["gradient_bytes"]))
    assumed = [f"assumed: {text}" for text in report.assumptions]
    return [
        Table(f"forecast: all-reduce of {size}, ms", ("ranks", *names), times),
        Table(
            "messages that follow one another, and bytes that a rank sends",
            ("ranks", *names),
            efforts,
            [*assumed, where(report)],
        ),
    ]


def cost_chart(report: dict[str, Any]) -> Any:
    """The forecast by number of ranks."""
    from matplotlib.ticker import FuncFormatter

    spec = report["spec"]
    size = show_bytes(parse_bytes("gradient_bytes", spec["gradient_bytes"]))
    title = f"All-reduce of {size}, modelled: {spec['ranks_per_host']} ranks a host, {spec['link_gbit']:g} Gbit/s links"
    figure, axes = new_figure(title, report, 4.8, right=0.82)
    ends = []
    names = [found["algorithm"] for found in report["forecast"]]
    for name, color in colors(names).items():
        line = [found for found in report["forecast"] if found["algorithm"] == name]
        times = [found["seconds"] * 1e3 for found in line]
        color = OURS if name == "two levels" else color  # what paceline does across hosts
        axes.plot([found["ranks"] for found in line], times, marker="o", markersize=4, color=color, linewidth=1.8)
        ends.append((name, times[-1], color))
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


COMMAND = Command(
    "cost-model",
    "A model of all-reduce up to 10,000 ranks, fitted and checked on this machine.",
    CostModelSpec,
    run_cost_model,
    cost_tables,
    cost_chart,
)

if __name__ == "__main__":
    sys.exit(run_script(COMMAND, sys.argv[1:]))
