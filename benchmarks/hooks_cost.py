"""What the reducer's own bookkeeping costs, per parameter: forward and backward over very many very small parameters.

python benchmarks/hooks_cost.py --worlds 2 --contenders paceline,torch,paceline@../before
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.chart import FAINT, colors, name_lines, new_figure
from paceline.bench.command import Command, run_script
from paceline.bench.conductor import Conductor, Log, no_log
from paceline.bench.contenders import CONTENDERS, ContenderName, find_contender, label_each
from paceline.bench.processes import Order
from paceline.bench.results import BenchReport, Circumstances
from paceline.bench.statistics import Ratio, flat, ratio_of_medians
from paceline.bench.tables import Columns, Table, ratio_columns, report_table, show_ms, verdict
from paceline.bench.tasks import Barrier
from paceline.bench.tasks.process_group import GroupTask, no_garbage_collection
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_list
from paceline.option import check_fields, option

TASK = f"{__file__}:HooksTask"
KNOWN = {name: CONTENDERS[name] for name in ("paceline", "torch")}
TARGET_S = 5e-6
Samples = dict[str, dict[int, list[list[float]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HooksSpec:
    """What the reducer itself costs per parameter."""

    parameters: str = option("250,500,1000,2000,4000,10000", "numbers of parameters, comma-separated")
    numel: int = option(16, "elements of a parameter: few, so that compute and bytes hardly count", low=1)
    worlds: str = option("1,2", "numbers of ranks, comma-separated")
    rounds: int = option(8, "turns of each contender at each number of parameters", low=1)
    burst: int = option(5, "timed backward passes in a turn", low=1)
    contenders: tuple[str, ...] = option(("paceline", "torch"), "comma-separated: paceline, paceline@PATH, torch")
    timeout: float = option(120.0, "seconds without an answer after which a contender is dropped", low=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(parse_list("parameters", self.parameters)) < 2:
            raise UsageError(f"a slope needs two numbers of parameters or more, got {self.parameters!r}")
        parse_list("worlds", self.worlds)
        for label in label_each(self.contenders):
            find_contender(label, KNOWN, files=False)


class ManyParameters(nn.Module):
    """A model that does hardly anything but have parameters."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum()


class HooksTask(GroupTask):
    """Times models with the numbers of parameters that the conductor asks for."""

    def __init__(self, spec: dict[str, Any], contender: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        torch.set_num_threads(1)
        self._spec, self._name = spec, ContenderName.parse(contender).name
        self._models: dict[int, nn.Module] = {}

    def build(self, ports: list[int]) -> dict[str, Any]:
        self._form_group(ports[0], torch.device("cpu"))
        return {}

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        count = message["parameters"]
        if count not in self._models:
            self._models[count] = self._wrap(ManyParameters(count, self._spec["numel"]))
            for _ in range(3):
                self._step(self._models[count], barrier)
        model = self._models[count]
        with no_garbage_collection():
            return {"seconds": [self._step(model, barrier) for _ in range(self._spec["burst"])]}

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._name == "paceline":
            import paceline  # here: it may be another checkout's

            return paceline.DistributedDataParallel(model)
        if self._name == "torch":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def _step(self, model: nn.Module, barrier: Barrier) -> float:
        """A step without an optimizer. zero_grad is part of it: there the bare model frees its gradients, which a
        reducer that has copied them frees in backward."""
        barrier()
        begin = time.perf_counter()
        model.zero_grad()
        model().backward()
        return time.perf_counter() - begin

    def close(self) -> None:
        self._models.clear()
        super().close()


@dataclass
class HooksRow:
    """What one contender adds to the bare model with one number of ranks."""

    label: str
    world: int
    parameters: list[int]
    bare_s: list[float]  # medians, one per number of parameters
    median_s: list[float]
    slope_s: float  # per parameter, over the bare model
    fixed_s: float
    to_torch: Ratio | None = None  # of whole steps with the largest number of parameters


@dataclass
class HooksReport(BenchReport):
    rows: list[HooksRow]
    samples_s: dict[str, dict[int, list[list[float]]]]  # by contender@world and parameters: rounds
    failures: dict[str, str]
    schema: str = "paceline-bench-hooks/1"


def run_hooks(spec: HooksSpec, log: Log = no_log) -> HooksReport:
    """Time steps with and without a reducer; the models differ in their number of parameters only."""
    worlds, labels = parse_list("worlds", spec.worlds), label_each(spec.contenders)
    orders = [
        Order(f"{name}@{world}", TASK, name, asdict(spec), world, 1, "cpu")
        for world in worlds
        for name in ("bare", *labels)
    ]
    samples: Samples = {order.label: {} for order in orders}
    with Conductor(orders, timeout_s=spec.timeout, log=log) as conductor:
        for count in parse_list("parameters", spec.parameters):
            log(f"{count} parameters")
            for _, label in conductor.in_turns(spec.rounds):
                times = conductor.time(label, {"parameters": count})
                if times is not None:
                    samples[label].setdefault(count, []).append(times)
        failures = {label: str(failure) for label, failure in conductor.failures.items()}
    rows = [
        _row(label, world, samples)
        for world in worlds
        for label in labels
        if not failures.keys() & {f"{label}@{world}", f"bare@{world}"}
    ]
    for row in rows:
        torch = f"torch@{row.world}"
        if torch in samples and torch not in failures:
            most = row.parameters[-1]
            row.to_torch = ratio_of_medians(samples[f"{row.label}@{row.world}"][most], samples[torch][most])
    return HooksReport(asdict(spec), Circumstances.now(contenders=labels), rows, samples, failures)


def _row(label: str, world: int, samples: Samples) -> HooksRow:
    ours, bare = samples[f"{label}@{world}"], samples[f"bare@{world}"]
    counts = sorted(ours)
    times, floor = ([median(flat(side[count])) for count in counts] for side in (ours, bare))
    added = [(float(count), t - b) for count, t, b in zip(counts, times, floor, strict=True)]
    fixed, slope = robust_line(added)
    return HooksRow(label, world, counts, floor, times, slope, fixed)


def robust_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y = a + b·x with the median of all pairwise slopes (Theil and Sen): one disturbed point moves it little."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x1 != x2]
    slope = median(slopes)
    return median([y - slope * x for x, y in points]), slope


def hooks_tables(report: HooksReport) -> list[Table]:
    most = max((row.parameters[-1] for row in report.rows), default=0)

    def added(row: HooksRow) -> str:
        return f"{(row.median_s[-1] - row.bare_s[-1]) / row.parameters[-1] * 1e6:.2f}"

    columns: Columns = {
        "contender": lambda row: row.label,
        "ranks": lambda row: str(row.world),
        "µs/parameter": lambda row: f"{row.slope_s * 1e6:.2f}",
        "fixed ms": lambda row: f"{row.fixed_s * 1e3:.3f}",
        f"target {TARGET_S * 1e6:g} µs": lambda row: verdict(row.slope_s <= TARGET_S),
        f"step of {most:,} ms": lambda row: show_ms(row.median_s[-1]),
        "µs each": added,
        **ratio_columns("× torch", "to_torch"),
    }
    notes = [f"{label}: failed: {message}" for label, message in report.failures.items()]
    notes.append(
        "A step is zero_grad, forward and backward; what counts is its time above that of the bare model, with "
        f"{report.spec['parameters']} parameters of {report.spec['numel']} elements."
    )
    legend = {
        "µs/parameter": "slope over the number of parameters (the median of pairwise slopes)",
        "fixed": "what is left at zero parameters",
        f"step of {most:,}": "the whole step with the most parameters",
        "µs each": "what each of those parameters adds to the bare model's step",
    }
    return report_table(
        report, "what the reducer adds to a step without an optimizer", columns, report.rows, notes, legend
    )


def hooks_chart(report: dict[str, Any]) -> Any:
    """What is added to the bare model, by number of parameters."""
    figure, axes = new_figure("What the reducer adds to a step without an optimizer", report, 4.6, right=0.82)
    labels = [f"{row['label']}, {row['world']} rank{'s' if row['world'] > 1 else ''}" for row in report["rows"]]
    ends = []
    shades = ("-", (0, (4, 2)), (0, (1, 1)))
    worlds = sorted({row["world"] for row in report["rows"]})
    tint = colors(row["label"] for row in report["rows"])
    for label, row in zip(labels, report["rows"], strict=True):
        extra = [(m - b) * 1e3 for m, b in zip(row["median_s"], row["bare_s"], strict=True)]
        color, style = tint[row["label"]], shades[worlds.index(row["world"]) % len(shades)]
        axes.plot(row["parameters"], extra, "o", markersize=4, color=color)
        line = [(row["fixed_s"] + row["slope_s"] * count) * 1e3 for count in row["parameters"]]
        axes.plot(row["parameters"], line, color=color, linestyle=style, linewidth=1.8)
        ends.append((f"{label}\n{row['slope_s'] * 1e6:.1f} µs each", line[-1], color))
    axes.set_xlabel("parameters", color=FAINT, fontsize=9)
    axes.set_ylabel("added to the bare model, ms", color=FAINT, fontsize=9)
    axes.set_xlim(0, None)
    name_lines(axes, ends, gap=0.11)
    return figure


COMMAND = Command("hooks", "What the reducer costs per parameter.", HooksSpec, run_hooks, hooks_tables, hooks_chart)

if __name__ == "__main__":
    sys.exit(run_script(COMMAND, sys.argv[1:]))
