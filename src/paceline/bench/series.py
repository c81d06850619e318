"""`run_accumulate` and `run_ranks`: the step comparison at several values of one setting."""

from dataclasses import asdict

from paceline.bench.conductor import Say
from paceline.bench.report import Circumstances, SeriesReport
from paceline.bench.spec import AccumulateSpec, RanksSpec, numbers
from paceline.bench.steps import run_steps


def run_accumulate(spec: AccumulateSpec, say: Say = lambda _: None) -> SeriesReport:
    """Compare at each number of micros."""
    return _run(spec, "accumulate", say)


def run_ranks(spec: RanksSpec, say: Say = lambda _: None) -> SeriesReport:
    """Compare at each number of ranks."""
    return _run(spec, "ranks", say)


def _run(spec: AccumulateSpec | RanksSpec, over: str, say: Say) -> SeriesReport:
    points = []
    for value in numbers(spec.values):
        say(f"{over} = {value}")
        points.append((value, run_steps(spec.at(value), say)))
    gpu = next((report.circumstances.hardware["gpu"] for _, report in points), None)
    return SeriesReport(asdict(spec), Circumstances.now(gpu), over, points)
