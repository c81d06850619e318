"""`run_steps`: the same training step under several contenders, interleaved."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.bench.conductor import Conductor, Say
from paceline.bench.contenders import CONTENDERS, Contender, ContenderName, find_contender, label_each
from paceline.bench.crew import Order
from paceline.bench.figures import flat, median, percentile, ratio_of_medians
from paceline.bench.report import Circumstances, ContenderResult, StepReport
from paceline.bench.spec import StepSpec, from_json

# Relative difference of losses up to which two contenders did the same arithmetic.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
REFERENCES = ("torch", "single", "paceline", "paceline-torch", "no-agreement")


@dataclass
class Record:
    """What the ranks of one contender have told so far."""

    rounds: list[list[dict[str, float]]] = field(default_factory=list)  # merged over ranks
    losses: list[float] = field(default_factory=list)
    observed: list[dict[str, Any]] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    finish: list[dict[str, Any]] = field(default_factory=list)


def run_steps(spec: StepSpec, say: Say = lambda _: None) -> StepReport:
    """Measure, and return what was found. A contender that fails does not stop the others."""
    spec = _expand(spec)
    results = {label: _empty(spec, label) for label in spec.contenders}
    orders = [_order(spec, label) for label, result in results.items() if result.state == "ok"]
    records: dict[str, Record] = {}
    gpu = None
    with Conductor(orders, timeout_s=spec.timeout, say=say) as conductor:
        for label in conductor.labels:
            records[label] = Record()
        _measure(spec, conductor, records, say)
        for label, built in conductor.built.items():
            results[label].sent_bytes = built[0]["sent_bytes"]
            results[label].notes += built[0]["notes"]
            gpu = built[0]["gpu"] or gpu
        for label, failure in conductor.failures.items():
            results[label].state, results[label].message = "failed", failure.message
            results[label].log = failure.log
    report = StepReport(asdict(spec), Circumstances.now(gpu, results), *count_parameters(spec), list(results.values()))
    for result in report.contenders:
        if result.state == "ok":
            _summarise(result, records[result.label], report.parameters)
    compare(report)
    return report


def _expand(spec: StepSpec) -> StepSpec:
    labels: list[str] = []
    for label in spec.contenders:
        labels += [name for name, one in CONTENDERS.items() if one.in_all] if label == "all" else [label]
    if spec.lanes:
        labels.append("lanes")
    return replace(spec, contenders=label_each(labels))


def _empty(spec: StepSpec, label: str) -> ContenderResult:
    contender = find_contender(label)
    result = ContenderResult(label, contender.about, "ok", _size(spec, contender))
    if missing := contender.missing():
        result.state, result.message = "not installed", f"{', '.join(missing)}: pip install 'paceline[peers]'"
    elif spec.device not in contender.devices:
        result.state, result.message = "not here", f"runs on {', '.join(contender.devices)} only"
    return result


def _size(spec: StepSpec, contender: Contender) -> int:
    return 1 if contender.one_process else spec.ranks


def _order(spec: StepSpec, label: str) -> Order:
    contender = find_contender(label)
    size = _size(spec, contender)
    threads = spec.threads * spec.ranks // size
    sources = ContenderName.parse(label).sources
    return Order(label, contender.task, asdict(spec), size, threads, spec.device, contender.launcher, sources)


def count_parameters(spec: StepSpec) -> tuple[int, int]:
    """Parameters of the model, and bytes of their gradients; without torch."""
    shape = spec.shape
    width = shape.width
    block = 12 * width * width + 13 * width  # four linear layers with bias, two norms
    total = 2 * shape.vocabulary * width + shape.context * width + shape.layers * block + 2 * width
    return total, total * (2 if shape.dtype == "bfloat16" else 4)


# ---- the run


def _measure(spec: StepSpec, conductor: Conductor, records: dict[str, Record], say: Say) -> None:
    rounds = math.ceil(spec.steps / spec.burst)
    if spec.warmup:
        for label in conductor.labels:
            say(f"warming up {label}")
            _burst(conductor, label, records[label], 0, spec.warmup, 0)
    told = -1
    for number, label in conductor.in_turns(rounds):
        if number > told:
            told = number
            say(f"round {number + 1} of {rounds}")
        timed = min(spec.burst, spec.steps - number * spec.burst)
        first = spec.warmup + number * (spec.burst + spec.settle)
        _burst(conductor, label, records[label], first, first + spec.settle + timed, timed)
    for label in conductor.labels:
        records[label].finish = conductor.ask(label, {"do": "finish"}) or []
    # After memory has been read: its buffers are not the contender's.
    for _, label in conductor.in_turns(3):
        answers = conductor.ask(label, {"do": "run", "what": "communicate"})
        if answers is not None and answers[0]["seconds"] is not None:
            records[label].alone_s.append(max(answer["seconds"] for answer in answers))


def _burst(conductor: Conductor, label: str, record: Record, first: int, until: int, timed: int) -> None:
    message = {"do": "run", "what": "steps", "first": first, "until": until, "timed": timed}
    answers = conductor.ask(label, message)
    if answers is None:
        return
    merged = []
    for ranks in zip(*(answer["steps"] for answer in answers), strict=True):
        slowest = max(ranks, key=lambda step: float(step["seconds"]))
        record.losses.append(sum(step["loss"] for step in ranks) / len(ranks))
        merged.append(slowest)
    if timed:
        record.rounds.append(merged[-timed:])
        record.observed.append(answers[0]["observed"])


# ---- the figures


def _summarise(result: ContenderResult, record: Record, parameters: int) -> None:
    result.samples_s = [[step["seconds"] for step in turn] for turn in record.rounds]
    samples = flat(result.samples_s)
    result.median_s, result.p10_s, result.p90_s = (percentile(samples, percent) for percent in (50, 10, 90))
    steps = [step for turn in record.rounds for step in turn]
    phases = [name for name in ("forward", "backward", "optimizer") if name in steps[0]]
    result.phases_s = {name: median([step[name] for step in steps]) for name in phases}
    result.losses = record.losses
    digests = [rank["digest"] for rank in record.finish]
    if digests and digests[0] is not None:
        result.digest = digests[0]
        result.replicas_equal = len(set(digests)) == 1
    peaks = [rank["peak_bytes"] for rank in record.finish if rank["peak_bytes"] is not None]
    if peaks:
        result.start_peak_bytes = max(rank["start_peak_bytes"] for rank in record.finish)
        result.peak_bytes = max(peaks)
        result.peak_bytes_per_parameter = max(peaks) / parameters
    if record.alone_s:
        result.communication_s, result.overlap_from = median(record.alone_s), "alone"
    _read_trace(result, record.observed)


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


def compare(report: StepReport) -> None:
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
            # A step below the floor was measured in noise that says nothing about what is hidden.
            if result.overlap_from == "alone" and result.communication_s and result.above_floor_s > 0:
                result.overlap = max(0.0, 1 - result.above_floor_s / result.communication_s)
    if torch is not None and torch.above_floor_s is not None and torch.above_floor_s > 0:
        for result in report.contenders:
            if result.above_floor_s is not None:
                result.above_floor_to_torch = result.above_floor_s / torch.above_floor_s
    _compare_losses(report)


def _compare_losses(report: StepReport) -> None:
    reference = next((found for name in REFERENCES if (found := report.result(name)) is not None), None)
    if reference is None:
        return
    tolerance = TOLERANCE[from_json(StepSpec, report.spec).shape.dtype]
    for result in report.contenders:
        contender = find_contender(result.label)
        if result.state != "ok" or not (contender.synchronises and contender.same_weights):
            continue
        result.loss_difference = max(
            abs(ours - theirs) / abs(theirs) for ours, theirs in zip(result.losses, reference.losses, strict=True)
        )
        result.agrees = result.loss_difference <= tolerance and result.replicas_equal is not False
