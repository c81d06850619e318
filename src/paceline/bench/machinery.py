"""`machinery`: what one rank adds to the bare model when it does all the work of a rank among several."""

from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.chart import ratio_chart
from paceline.bench.command import Command
from paceline.bench.conductor import Conductor, Log, no_log
from paceline.bench.contenders import CONTENDERS, find_contender, label_each
from paceline.bench.processes import Order
from paceline.bench.results import BenchReport, Circumstances, TimedResult, record_failures
from paceline.bench.spec import StepSpec, TrainingSpec
from paceline.bench.statistics import Ratio, ratio_of_medians
from paceline.bench.step_comparison import TOLERANCE
from paceline.bench.tables import Columns, Table, failure_notes, ratio_columns, report_table, show, show_agreement
from paceline.errors import UsageError
from paceline.memory_plan.numbers import show_count
from paceline.option import check_fields, option

TASK = "paceline.bench.tasks.timed_bursts:MachineryTask"
MACHINERY = {
    name: CONTENDERS[name] for name in ("bare", "torch", "paceline", "no-agreement", "zero1", "zero2", "zero3", "fsdp2")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinerySpec(TrainingSpec):
    """What the machinery alone costs: one rank does all the work of a rank among several, and the network costs
    nothing."""

    micro_batch: int = option(1, "sequences per step", low=1)
    warmup: int = option(6, "untimed steps before the first turn", low=0)
    backend: str = option("auto", "backend of torch.distributed, such as nccl; auto: gloo, and NCCL beside it on a GPU")
    compile: bool = option(False, "apply torch.compile to the model before it is wrapped")
    contenders: tuple[str, ...] = option(
        ("bare", "bare", "torch", "paceline", "no-agreement"),
        f"comma-separated: {', '.join(MACHINERY)}. paceline@PATH takes paceline from another checkout, and a name "
        "given twice adds an A/A row that shows the noise",
    )
    rounds: int = option(10, "turns of each contender", low=1)
    burst: int = option(10, "steps that are timed together in a turn, with one synchronization at their end", low=1)
    settle: int = option(
        2, "untimed steps at the start of each turn, while caches still hold another contender's data", low=0
    )
    learning_rate: float = option(1e-5, "learning rate of AdamW; the batch is always the same")
    seed: int = option(0, "seed of weights and data")

    def __post_init__(self) -> None:
        check_fields(self)
        for label in label_each(self.contenders):
            find_contender(label, MACHINERY, files=False)
        if "bare" not in self.contenders:
            raise UsageError(
                f"contenders={','.join(self.contenders)}: expected `bare` among them, the baseline of all ratios"
            )
        self.step()

    def step(self) -> StepSpec:
        """The training step that is measured."""
        return self.step_spec(ranks=1)


@dataclass
class MachineryResult(TimedResult):
    """One contender's figures when one rank does the work of several. A round has one sample: the mean of a burst."""

    to_bare: Ratio | None = None
    added_per_tensor_s: float | None = None  # (step − bare) / tensors


@dataclass
class MachineryReport(BenchReport):
    parameters: int
    tensors: int
    contenders: list[MachineryResult]
    schema: str = "paceline-bench-machinery/1"


def run_machinery(spec: MachinerySpec, log: Log = no_log) -> MachineryReport:
    """Measure, and return the results. A contender that fails does not stop the others."""
    results = {label: MachineryResult(label, find_contender(label).about) for label in label_each(spec.contenders)}
    orders = [Order(label, TASK, label, spec, 1, spec.threads, spec.device) for label in results]
    with Conductor(orders, timeout_s=spec.timeout, log=log) as conductor:
        if spec.warmup:
            log("warming up")
            # All at once, because compilation takes most of this time.
            conductor.ask_all("run", dict.fromkeys(conductor.labels, ({"settle": 0, "steps": spec.warmup},)))
        for _, label in conductor.in_turns(spec.rounds, log_rounds=True):
            answers = conductor.ask(label, "run", {"settle": spec.settle, "steps": spec.burst})
            if answers is not None:
                results[label].samples_s.append(answers[0]["seconds"])
                results[label].losses.append(answers[0]["loss"])
        record_failures(results, conductor.failures)
    tensors = next((facts[0]["tensors"] for facts in conductor.built.values()), 0)
    circumstances = Circumstances.now(conductor.gpu, results)
    report = MachineryReport(asdict(spec), circumstances, spec.shape.parameters, tensors, list(results.values()))
    compare(report, TOLERANCE[spec.shape.dtype])
    return report


def compare(report: MachineryReport, tolerance: float) -> None:
    """Fill in what follows from the samples."""
    done = [result for result in report.contenders if result.state == "ok"]
    for result in done:
        result.summarize()
    bare = next((result for result in done if result.label == "bare"), None)
    if bare is None or bare.median_s is None:
        return
    for result in done:
        if result is not bare and result.median_s is not None:
            result.to_bare = ratio_of_medians(result.samples_s, bare.samples_s)
            result.added_per_tensor_s = (result.median_s - bare.median_s) / report.tensors
            result.compare_losses(bare.losses, tolerance)


MACHINERY_COLUMNS: Columns = {
    "contender": lambda row: row.label,
    "step ms": lambda row: show(row.median_s * 1e3, ".2f"),
    "p10–p90": lambda row: f"{row.p10_s * 1e3:.2f}–{row.p90_s * 1e3:.2f}",
    **ratio_columns("× bare", "to_bare", digits=3),
    "µs/tensor": lambda row: show(row.added_per_tensor_s and row.added_per_tensor_s * 1e6, ".1f"),
    "same loss": show_agreement,
}


def machinery_tables(report: MachineryReport) -> list[Table]:
    """One row per contender. `bare (A/A)` is the same program as `bare`, so its ratio shows the noise."""
    spec = report.spec
    parts = [
        spec["model"],
        f"{show_count(report.parameters)} parameters in {report.tensors} tensors",
        f"microbatch of {spec['micro_batch']}{', compiled' if spec['compile'] else ''} on {spec['device']}",
        f"backend {spec['backend']}",
        f"{spec['rounds']} rounds of {spec['burst']} steps",
    ]
    done: list[MachineryResult] = [result for result in report.contenders if result.state == "ok"]
    notes = failure_notes(report.contenders)
    notes.append(
        "One rank, in a group of its own, does all the work of a rank among several. What it adds to the bare model is "
        "the cost of the machinery alone."
    )
    legend = {
        "p10–p90": "spread over turns; a turn is one burst with one synchronization at its end",
        "µs/tensor": "added time divided by the number of parameter tensors",
    }
    return report_table(report, ", ".join(parts), MACHINERY_COLUMNS, done, notes, legend)


def machinery_chart(report: dict[str, Any]) -> Any:
    """Step times relative to the bare model's."""
    spec = report["spec"]
    how = ", compiled" if spec["compile"] else ""
    title = f"What the machinery adds to {spec['model']}, microbatch of {spec['micro_batch']}{how}, on {spec['device']}"
    bars = [(found["label"], found["to_bare"], None) for found in report["contenders"]]
    return ratio_chart(title, report, bars)


ABOUT = "What one rank adds to the bare model when the network costs nothing."
COMMAND = Command("machinery", ABOUT, MachinerySpec, run_machinery, machinery_tables, machinery_chart)
