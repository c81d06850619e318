"""`allreduce`: latency and bandwidth by size, contenders in turns."""

from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.chart import FAINT, line_chart
from paceline.bench.command import Command
from paceline.bench.conductor import Conductor, Log, no_log
from paceline.bench.contenders import Contender, ContenderName, find_contender, label_each, short_label
from paceline.bench.processes import Order
from paceline.bench.results import BenchReport, Circumstances
from paceline.bench.spec import parse_sizes
from paceline.bench.statistics import flat, percentile
from paceline.bench.tables import Table, report_table, show
from paceline.memory_plan.numbers import show_bytes
from paceline.option import check_fields, option

TASK = "paceline.bench.tasks.timed_allreduce:AllReduceTask"
KNOWN = {
    "paceline": Contender("the transport that paceline chooses"),
    "gloo": Contender("torch.distributed over gloo"),
    "nccl": Contender("torch.distributed over NCCL", devices=("cuda",)),
}
MOST_BYTES_PER_TURN = 32 * 1024 * 1024
REPEATS = (3, 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSpec:
    """All-reduce of one flat tensor, by size."""

    sizes: str = option("4KiB..256MiB", "bytes: FROM..TO in factors of four, or a comma-separated list")
    ranks: int = option(2, "ranks of each contender", low=1)
    rounds: int = option(5, "turns of each contender at each size", low=1)
    threads: int = option(1, "compute threads per rank", low=1)
    device: str = option("cpu", "cpu or cuda", choices=("cpu", "cuda"))
    contenders: tuple[str, ...] = option(
        ("paceline", "gloo"), "comma-separated: paceline, paceline@PATH, gloo, nccl, or FILE.py:NAME"
    )
    timeout: float = option(120.0, "seconds without an answer after which a contender is dropped", low=1)

    def __post_init__(self) -> None:
        check_fields(self)
        parse_sizes(self.sizes)


@dataclass
class AllReduceRow:
    """One contender at one size."""

    label: str
    nbytes: int
    samples_s: list[list[float]]
    median_s: float
    p10_s: float
    p90_s: float


@dataclass
class AllReduceReport(BenchReport):
    rows: list[AllReduceRow]
    absent: dict[str, str]  # by contender: why it is missing
    transport: str = ""  # that paceline chose
    schema: str = "paceline-bench-allreduce/2"


def run_allreduce(spec: AllReduceSpec, log: Log = no_log) -> AllReduceReport:
    """Measure, and return the results."""
    found = {label: find_contender(label, KNOWN) for label in label_each(spec.contenders)}
    reasons = {label: contender.why_absent(spec.device) for label, contender in found.items()}
    absent = {label: why.removeprefix("not here: ") for label, why in reasons.items() if why}
    orders = [_order(spec, label, contender) for label, contender in found.items() if label not in absent]
    samples: dict[tuple[int, str], list[list[float]]] = {}
    with Conductor(orders, timeout_s=spec.timeout, log=log) as conductor:
        for nbytes in parse_sizes(spec.sizes):
            log(f"all-reduce of {show_bytes(nbytes)}")
            repeats = max(REPEATS[0], min(REPEATS[1], MOST_BYTES_PER_TURN // nbytes))
            for _, label in conductor.in_turns(spec.rounds):
                times = conductor.time(label, {"nbytes": nbytes, "repeats": repeats})
                if times is not None:
                    samples.setdefault((nbytes, label), []).append(times)
        absent |= {label: str(failure) for label, failure in conductor.failures.items()}
        built = conductor.built
    rows = [_row(label, nbytes, rounds) for (nbytes, label), rounds in samples.items() if label not in absent]
    transport = built["paceline"][0]["transport"] if "paceline" in built else ""
    return AllReduceReport(asdict(spec), Circumstances.now(conductor.gpu, found), rows, absent, transport)


def _order(spec: AllReduceSpec, label: str, contender: Contender) -> Order:
    device = spec.device if ContenderName.parse(label).name in ("paceline", "nccl") else "cpu"
    return Order(label, TASK, label, spec, spec.ranks, spec.threads, device, contender.mpiexec)


def _row(label: str, nbytes: int, rounds: list[list[float]]) -> AllReduceRow:
    low, middle, high = (percentile(flat(rounds), percent) for percent in (10, 50, 90))
    return AllReduceRow(label, nbytes, rounds, middle, low, high)


def allreduce_tables(report: AllReduceReport) -> list[Table]:
    labels = list(dict.fromkeys(row.label for row in report.rows))
    peers = [label for label in labels if label != "paceline"] if "paceline" in labels else []
    cells = {(row.nbytes, row.label): row for row in report.rows}
    header = ["size"]
    for unit, shown in (("{} ms", labels), ("{} GB/s", labels), ("× {}", peers)):
        header += [unit.format(short_label(label)) for label in shown]
    rows = []
    for nbytes in dict.fromkeys(row.nbytes for row in report.rows):
        found = [cells.get((nbytes, label)) for label in labels]
        ours = cells.get((nbytes, "paceline"))
        row = [show_bytes(nbytes), *(show(one.median_s * 1e3 if one else None, ".3f") for one in found)]
        row += [show(nbytes / one.median_s / 1e9 if one else None, ".2f") for one in found]
        theirs = [cells.get((nbytes, label)) for label in peers]
        row += [show(one.median_s / ours.median_s if one and ours else None, ".2f") for one in theirs]
        rows.append(row)
    notes = [f"{short_label(label)}: {why}" for label, why in report.absent.items()]
    notes.append(f"paceline used {report.transport}. GB/s: size / time. × NAME: paceline's bandwidth over NAME's.")
    title = f"all-reduce of one float32 tensor over {report.spec['ranks']} ranks"
    return report_table(report, title, header, rows, notes)


def allreduce_chart(report: dict[str, Any]) -> Any:
    """Bandwidth by size, one line per contender."""
    from matplotlib.ticker import FuncFormatter

    lines: dict[str, list[tuple[float, ...]]] = {}
    for row in report["rows"]:
        rates = (row["nbytes"] / row[key] / 1e9 for key in ("median_s", "p90_s", "p10_s"))
        lines.setdefault(row["label"], []).append((row["nbytes"], *rates))
    title = f"all-reduce of one float32 tensor over {report['spec']['ranks']} ranks"
    figure, axes = line_chart(title, report, lines, log=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("size / time, GB/s; band from p10 to p90", color=FAINT, fontsize=9)
    return figure


COMMAND = Command(
    "allreduce", "All-reduce alone, by size.", AllReduceSpec, run_allreduce, allreduce_tables, allreduce_chart
)
