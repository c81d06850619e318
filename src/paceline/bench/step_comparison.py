"""`run_steps`: the same training step under several contenders, interleaved."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from paceline.bench.conductor import Conductor, Log, no_log
from paceline.bench.contenders import CONTENDERS, find_contender, label_each
from paceline.bench.processes import Order
from paceline.bench.results import BenchReport, Circumstances, TimedResult, record_failures
from paceline.bench.spec import MODELS, StepSpec
from paceline.bench.statistics import Ratio, ratio_of_medians

TASK = "paceline.bench.tasks.timed_steps:StepTask"
# Relative difference of losses up to which two contenders did the same arithmetic.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
REFERENCES = ("torch", "single", "paceline", "paceline-torch", "no-agreement")


@dataclass
class ContenderResult(TimedResult):
    """One contender's figures in a comparison of steps."""

    ranks: int = 1
    notes: list[str] = field(default_factory=list)
    to_torch: Ratio | None = None
    to_floor: Ratio | None = None
    above_floor_s: float | None = None  # step − floor
    communication_s: float | None = None
    overlap: float | None = None  # the part of communication that is hidden
    overlap_from: str = ""  # "trace", or "alone": 1 − above floor / communication with nothing to hide under
    predicted_exposed_s: float | None = None  # communication while the rank could only wait, by the bucket plan
    traced_exposed_s: float | None = None  # the same, by the trace
    sent_bytes: int | None = None  # per rank and step, by the algorithm
    peak_bytes: int | None = None  # while training, of the rank that needs most
    peak_bytes_per_parameter: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    bucket_bytes: list[int] = field(default_factory=list)
    replicas_equal: bool | None = None


@dataclass
class StepComparison(BenchReport):
    parameters: int
    gradient_bytes: int
    contenders: list[ContenderResult]
    schema: str = "paceline-bench-step/3"

    def result(self, label: str) -> ContenderResult | None:
        """A contender's result, if it has one."""
        return next((found for found in self.contenders if found.label == label and found.state == "ok"), None)


@dataclass
class Answers:
    """What the ranks of one contender have answered so far."""

    rounds: list[list[dict[str, float]]] = field(default_factory=list)  # the slowest rank of each step
    losses: list[float] = field(default_factory=list)
    observed: list[dict[str, Any]] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    finish: list[dict[str, Any]] = field(default_factory=list)


def run_steps(spec: StepSpec, log: Log = no_log) -> StepComparison:
    """Measure, and return the results. A contender that fails does not stop the others."""
    spec = _expand(spec)
    results = {label: _empty(spec, label) for label in spec.contenders}
    orders = [_order(spec, label) for label, result in results.items() if result.state == "ok"]
    with Conductor(orders, timeout_s=spec.timeout, log=log) as conductor:
        answers = {label: Answers() for label in conductor.labels}
        _measure(spec, conductor, answers, log)
        for label, built in conductor.built.items():
            results[label].sent_bytes = built[0]["sent_bytes"]
            results[label].notes += built[0]["notes"]
        record_failures(results, conductor.failures)
    shape, circumstances = spec.shape, Circumstances.now(conductor.gpu, results)
    contenders = list(results.values())
    report = StepComparison(asdict(spec), circumstances, shape.parameters, shape.gradient_bytes, contenders)
    for result in contenders:
        if result.state == "ok":
            _summarize(result, answers[result.label], report.parameters)
    compare(report)
    return report


def _expand(spec: StepSpec) -> StepSpec:
    labels: list[str] = []
    for label in spec.contenders:
        labels += [name for name, one in CONTENDERS.items() if one.in_all] if label == "all" else [label]
    return replace(spec, contenders=label_each(labels))


def _empty(spec: StepSpec, label: str) -> ContenderResult:
    contender = find_contender(label)
    result = ContenderResult(label, contender.about, ranks=1 if contender.one_process else spec.ranks)
    if why := contender.why_absent(spec.device):
        result.state, _, result.message = why.partition(": ")
    return result


def _order(spec: StepSpec, label: str) -> Order:
    contender = find_contender(label)
    size = 1 if contender.one_process else spec.ranks
    threads = spec.threads * spec.ranks // size
    return Order(label, TASK, label, spec, size, threads, spec.device, contender.mpiexec)


# ---- the run


def _measure(spec: StepSpec, conductor: Conductor, answers: dict[str, Answers], log: Log) -> None:
    rounds = math.ceil(spec.steps / spec.burst)
    if spec.warmup:
        for label in conductor.labels:
            log(f"warming up {label}")
            _burst(conductor, label, answers[label], 0, spec.warmup, 0)
    for number, label in conductor.in_turns(rounds, log_rounds=True):
        timed = min(spec.burst, spec.steps - number * spec.burst)
        first = spec.warmup + number * (spec.burst + spec.settle)
        _burst(conductor, label, answers[label], first, first + spec.settle + timed, timed)
    for label in conductor.labels:
        answers[label].finish = conductor.ask(label, "finish") or []
    # After memory was measured: these buffers are not the contender's.
    for _, label in conductor.in_turns(3):
        ranks = conductor.ask(label, "run", {"what": "communicate"})
        if ranks is not None and ranks[0]["seconds"] is not None:
            answers[label].alone_s.append(max(rank["seconds"] for rank in ranks))


def _burst(conductor: Conductor, label: str, answers: Answers, first: int, until: int, timed: int) -> None:
    ranks = conductor.ask(label, "run", {"what": "steps", "first": first, "until": until, "timed": timed})
    if ranks is None:
        return
    slowest = []
    for step in zip(*(rank["steps"] for rank in ranks), strict=True):
        slowest.append(max(step, key=lambda of_rank: float(of_rank["seconds"])))
        answers.losses.append(sum(of_rank["loss"] for of_rank in step) / len(step))
    if timed:
        answers.rounds.append(slowest[-timed:])
        answers.observed.append(ranks[0]["observed"])


# ---- the figures


def _summarize(result: ContenderResult, answers: Answers, parameters: int) -> None:
    result.samples_s = [[step["seconds"] for step in turn] for turn in answers.rounds]
    result.summarize()
    steps = [step for turn in answers.rounds for step in turn]
    phases = [name for name in ("forward", "backward", "optimizer") if name in steps[0]]
    result.phases_s = {name: median([step[name] for step in steps]) for name in phases}
    result.losses = answers.losses
    digests = [rank["digest"] for rank in answers.finish]
    if digests and digests[0] is not None:
        result.replicas_equal = len(set(digests)) == 1
    peaks = [rank["peak_bytes"] for rank in answers.finish if rank["peak_bytes"] is not None]
    if peaks:
        result.peak_bytes = max(peaks)
        result.peak_bytes_per_parameter = max(peaks) / parameters
    if answers.alone_s:
        result.communication_s, result.overlap_from = median(answers.alone_s), "alone"
    _read_trace(result, answers.observed)


def _read_trace(result: ContenderResult, observed: Sequence[dict[str, Any]]) -> None:
    def values(name: str) -> list[float]:
        return [turn[name] for turn in observed if turn.get(name) is not None]

    if values("overlap"):
        result.overlap, result.overlap_from = median(values("overlap")), "trace"
        result.communication_s = median(values("communication_s"))
        result.traced_exposed_s = median(values("exposed_communication_s"))
    if values("predicted_exposed_s"):
        result.predicted_exposed_s = values("predicted_exposed_s")[-1]
    if observed:
        result.bucket_bytes = observed[-1].get("bucket_bytes", [])


def compare(report: StepComparison) -> None:
    """Fill in what needs two contenders: ratios, time above the floor, overlap, and whether losses agree."""
    floor, torch = report.result("floor"), report.result("torch")
    for result in report.contenders:
        if result.state != "ok" or result.median_s is None:
            continue
        if torch is not None:
            result.to_torch = ratio_of_medians(result.samples_s, torch.samples_s)
        if floor is not None and floor.median_s is not None:
            result.to_floor = ratio_of_medians(result.samples_s, floor.samples_s)
            result.above_floor_s = result.median_s - floor.median_s
            # A step faster than the floor is noise, and says nothing about what is hidden.
            if result.overlap_from == "alone" and result.communication_s and result.above_floor_s > 0:
                result.overlap = max(0.0, 1 - result.above_floor_s / result.communication_s)
    _compare_losses(report)


def _compare_losses(report: StepComparison) -> None:
    reference = next((found for name in REFERENCES if (found := report.result(name)) is not None), None)
    if reference is None:
        return
    tolerance = TOLERANCE[MODELS[report.spec["model"]].dtype]
    for result in report.contenders:
        contender = find_contender(result.label)
        if result.state == "ok" and contender.synchronizes and contender.same_weights:
            result.compare_losses(reference.losses, tolerance)
            result.agrees = result.agrees and result.replicas_equal is not False
