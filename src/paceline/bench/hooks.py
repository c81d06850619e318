"""`run_hooks`: what the reducer's own bookkeeping costs, per parameter."""

from dataclasses import asdict

from paceline.bench.conductor import Conductor, Say
from paceline.bench.contenders import ContenderName, label_each
from paceline.bench.crew import Order
from paceline.bench.figures import flat, median, ratio_of_medians, robust_line
from paceline.bench.report import Circumstances, HooksReport, HooksRow
from paceline.bench.spec import HooksSpec
from paceline.memory_plan.numbers import parse_list

TARGET_S = 5e-6
Samples = dict[str, dict[int, list[list[float]]]]


def run_hooks(spec: HooksSpec, say: Say = lambda _: None) -> HooksReport:
    """Time steps with and without a reducer; the models differ in their number of parameters only."""
    worlds, counts = parse_list("worlds", spec.worlds), parse_list("parameters", spec.parameters)
    labels = label_each(spec.contenders)
    orders = [
        Order(f"{label}@{world}", "hooks", asdict(spec), world, 1, "cpu", sources=ContenderName.parse(label).sources)
        for world in worlds
        for label in ("bare", *labels)
    ]
    samples: Samples = {order.label: {} for order in orders}
    with Conductor(orders, timeout_s=spec.timeout, say=say) as conductor:
        for count in counts:
            say(f"{count} parameters")
            for _, label in conductor.in_turns(spec.rounds):
                answers = conductor.ask(label, {"do": "run", "parameters": count})
                if answers is not None:
                    turn = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
                    samples[label].setdefault(count, []).append(turn)
        failures = {label: failure.message for label, failure in conductor.failures.items()}
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
    times, floor = [median(flat(ours[count])) for count in counts], [median(flat(bare[count])) for count in counts]
    extra = [(float(count), t - b) for count, t, b in zip(counts, times, floor, strict=True)]
    fixed, slope = robust_line(extra)
    return HooksRow(label, world, counts, floor, times, slope, fixed)
