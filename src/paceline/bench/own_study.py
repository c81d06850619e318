"""`run_lanes` and `run_agreement`: paceline beside itself, to see what a promise costs."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from paceline.bench.conductor import Say
from paceline.bench.figures import Rounds, median, ratio_of_medians
from paceline.bench.report import AgreementReport, Circumstances, LanesReport, LanesRow, StepReport
from paceline.bench.spec import LANE_PAIRS, AgreementSpec, LanesSpec
from paceline.bench.steps import run_steps

# A step where every rank runs one lane, over the plain step.
ALLOWED_RATIO = {"shm": 1.05, "torch": 1.15}
ALLOWED_CHECKS = 1.01
COPIES_NOISE = 0.25  # of all gradients: memory of a process is not counted more exactly,
COUNTED_BYTES = 1 << 24  # nor for small models at all


def run_lanes(spec: LanesSpec, say: Say = lambda _: None) -> LanesReport:
    """Compare at each number of lanes and ranks."""
    points = []
    for lanes, ranks in spec.points():
        say(f"{lanes} lanes on {ranks} rank{'s' if ranks > 1 else ''}")
        points.append(run_steps(spec.at(lanes, ranks), say))
    return lanes_report(spec, points)


def lanes_report(spec: LanesSpec, points: Sequence[StepReport]) -> LanesReport:
    """What the comparisons at the points of `spec` tell."""
    rows = [
        _row(point, way, *place)
        for point, place in zip(points, spec.points(), strict=True)
        for way in spec.ways(place[1])
    ]
    return LanesReport(asdict(spec), _circumstances(points), [row for row in rows if row is not None], list(points))


def _row(point: StepReport, way: str, lanes: int, ranks: int) -> LanesRow | None:
    plain, ours = (point.result(label) for label in LANE_PAIRS[way])
    if plain is None or ours is None or plain.median_s is None or ours.median_s is None:
        return None
    more = None
    if plain.peak_bytes is not None and ours.peak_bytes is not None and point.gradient_bytes >= COUNTED_BYTES:
        more = (ours.peak_bytes - plain.peak_bytes) / point.gradient_bytes
    return LanesRow(
        way,
        lanes,
        ranks,
        plain.median_s,
        ours.median_s,
        ratio_of_medians(ours.samples_s, plain.samples_s),
        ALLOWED_RATIO[way] if ranks == lanes and ranks > 1 else None,
        more,
        math.ceil(math.log2(lanes // ranks)),
    )


def run_agreement(spec: AgreementSpec, say: Say = lambda _: None) -> AgreementReport:
    """Compare several times, each with processes started anew."""
    points = []
    for number in range(spec.starts):
        say(f"start {number + 1} of {spec.starts}")
        points.append(run_steps(spec.each(), say))
    return agreement_report(spec, points)


def agreement_report(spec: AgreementSpec, points: Sequence[StepReport]) -> AgreementReport:
    """What the comparisons of all starts tell together."""
    with_checks, without = ([point.result(label) for point in points] for label in ("agreement", "no-agreement"))
    pairs = [
        level(ours.samples_s, plain.samples_s)
        for ours, plain in zip(with_checks, without, strict=True)
        if ours and plain
    ]
    ratio = None
    if pairs:
        ours, plain = ([turn for pair in pairs for turn in pair[side]] for side in (0, 1))
        ratio = ratio_of_medians(ours, plain)
    by_start = [ratio_of_medians(*pair).value for pair in pairs]
    return AgreementReport(asdict(spec), _circumstances(points), ratio, by_start, ALLOWED_CHECKS, list(points))


def level(ours: Rounds, plain: Rounds) -> tuple[Rounds, Rounds]:
    """Both in units of the plain median of their round: a machine that grows slower meanwhile is no cost of ours."""
    units = [median(turn) for turn in plain]
    first, second = (
        [[sample / unit for sample in turn] for turn, unit in zip(side, units, strict=False)] for side in (ours, plain)
    )
    return first, second


def _circumstances(points: Sequence[StepReport]) -> Circumstances:
    return Circumstances.now(next((point.circumstances.hardware["gpu"] for point in points), None))
