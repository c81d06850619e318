"""`run_machinery`: what one rank adds to the bare model when it does all that it would do among several."""

from dataclasses import asdict

from paceline.bench.conductor import Conductor, Say
from paceline.bench.contenders import ContenderName, find_contender, label_each
from paceline.bench.crew import Order
from paceline.bench.figures import flat, percentile, ratio_of_medians
from paceline.bench.report import Circumstances, MachineryReport, MachineryResult
from paceline.bench.spec import MachinerySpec
from paceline.bench.steps import TOLERANCE, count_parameters


def run_machinery(spec: MachinerySpec, say: Say = lambda _: None) -> MachineryReport:
    """Measure, and return what was found. A contender that fails does not stop the others."""
    results = {label: MachineryResult(label, find_contender(label).about) for label in label_each(spec.contenders)}
    orders = [
        Order(
            label, "machinery", asdict(spec), 1, spec.threads, spec.device, sources=ContenderName.parse(label).sources
        )
        for label in results
    ]
    with Conductor(orders, timeout_s=spec.timeout, say=say) as conductor:
        if spec.warmup:
            say("warming up")
            # Together, since a compiler has most to do here.
            warm = {"do": "run", "settle": 0, "steps": spec.warmup}
            conductor.ask_all(dict.fromkeys(conductor.labels, warm))
        told = -1
        for number, label in conductor.in_turns(spec.rounds):
            if number > told:
                told = number
                say(f"round {number + 1} of {spec.rounds}")
            answers = conductor.ask(label, {"do": "run", "settle": spec.settle, "steps": spec.burst})
            if answers is not None:
                results[label].samples_s.append([answers[0]["seconds"]])
                results[label].losses.append(answers[0]["loss"])
        for label, failure in conductor.failures.items():
            results[label].state, results[label].message = "failed", failure.message
            results[label].log = failure.log
        built = [facts[0] for facts in conductor.built.values()]
    gpu, tensors = (next((facts[name] for facts in built), None) for name in ("gpu", "tensors"))
    parameters, _ = count_parameters(spec.step())
    circumstances = Circumstances.now(gpu, results)
    report = MachineryReport(asdict(spec), circumstances, parameters, tensors or 0, list(results.values()))
    compare(report, TOLERANCE[spec.step().shape.dtype])
    return report


def compare(report: MachineryReport, tolerance: float) -> None:
    """Fill in what follows from the samples."""
    done = [result for result in report.contenders if result.state == "ok"]
    for result in done:
        samples = flat(result.samples_s)
        result.median_s, result.p10_s, result.p90_s = (percentile(samples, percent) for percent in (50, 10, 90))
    bare = next((result for result in done if result.label == "bare"), None)
    if bare is None or bare.median_s is None:
        return
    for result in done:
        if result is bare or result.median_s is None:
            continue
        result.to_bare = ratio_of_medians(result.samples_s, bare.samples_s)
        result.added_per_tensor_s = (result.median_s - bare.median_s) / report.tensors
        result.loss_difference = max(
            abs(ours - theirs) / abs(theirs) for ours, theirs in zip(result.losses, bare.losses, strict=True)
        )
        result.agrees = result.loss_difference <= tolerance
