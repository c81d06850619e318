"""`run_series`: the step comparison at several values of one setting."""

from dataclasses import asdict

from paceline.bench.conductor import Say
from paceline.bench.report import Circumstances, SeriesReport
from paceline.bench.spec import SeriesSpec
from paceline.bench.steps import run_steps
from paceline.memory_plan.numbers import parse_list


def run_series(spec: SeriesSpec, say: Say = lambda _: None) -> SeriesReport:
    """Compare at each value of the setting that the series goes over."""
    points = []
    for value in parse_list("values", spec.values):
        say(f"{spec.over} = {value}")
        points.append((value, run_steps(spec.at(value), say)))
    gpu = next((report.circumstances.hardware["gpu"] for _, report in points), None)
    return SeriesReport(asdict(spec), Circumstances.now(gpu), spec.over, points)
