"""`run_cost_model`: measures all-reduces, fits the model, checks it, and carries it on to many ranks."""

import os
from dataclasses import asdict

from paceline.bench.allreduce import run_allreduce
from paceline.bench.conductor import Say
from paceline.bench.cost_model import FORECASTS, RING, SHARED_MEMORY, Algorithm, Hosts, Link, crowding, seconds
from paceline.bench.figures import fit_two, median
from paceline.bench.report import Circumstances, CostFit, CostModelReport, CostPoint, Forecast
from paceline.bench.spec import AllReduceSpec, CostModelSpec, parse_bytes, parse_sizes
from paceline.memory_plan.numbers import parse_list

FORECAST_RANKS = (8, 16, 64, 256, 1024, 4096, 10_000)
Measured = dict[str, list[tuple[int, int, float]]]  # contender: (ranks, bytes, seconds)


def run_cost_model(spec: CostModelSpec, say: Say = lambda _: None) -> CostModelReport:
    """Measure, fit, check, forecast."""
    measured: Measured = {}
    transport = ""
    for ranks in (*parse_list("fit_ranks", spec.fit_ranks), *parse_list("check_ranks", spec.check_ranks)):
        say(f"all-reduces over {ranks} ranks")
        wanted = AllReduceSpec(
            sizes=spec.sizes, ranks=ranks, rounds=spec.rounds, contenders=("paceline", "gloo"), timeout=spec.timeout
        )
        report = run_allreduce(wanted, say)
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
    nbytes = parse_bytes(spec.gradient_bytes)
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
