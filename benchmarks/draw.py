"""Draws a stored result again: python benchmarks/draw.py RESULT.json CHART.png"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import agreement_cost, cost_model, hooks_cost, lanes_cost
from paceline.bench.commands import COMMANDS
from paceline.bench.series import series_chart

CHARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{command.name: command.chart for command in COMMANDS.values()},
    **{study.COMMAND.name: study.COMMAND.chart for study in (agreement_cost, cost_model, hooks_cost, lanes_cost)},
    "series": series_chart,
}


def draw(result: Path, chart: Path) -> None:
    """Draw the report of `result`, whose schema says which measurement it is of, into `chart`."""
    report = json.loads(result.read_text())
    CHARTS[report["schema"].split("/")[0].removeprefix("paceline-bench-")](report).savefig(chart)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/draw.py RESULT.json CHART.png")
    draw(*map(Path, sys.argv[1:]))
