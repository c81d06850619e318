"""`paceline simulate`."""

import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from paceline.cli.options import command_for
from paceline.errors import UsageError
from paceline.memory_plan.plan_chart import require_outputs
from paceline.simulate.assumptions import SimulationSettings
from paceline.simulate.goodput_chart import draw
from paceline.simulate.simulation import Simulation

FILES = {
    "json": (Path | None, "write all figures to this file"),
    "png": (Path | None, "draw a chart into this file (needs matplotlib)"),
}
ABOUT = """Simulate jobs of very many ranks: how much of the time they train when ranks fail.

Recovery in memory is compared with restarts from a checkpoint. Nothing is started and torch is not loaded."""


def simulate_command() -> Callable[..., None]:
    """The function that typer reads; register it as `simulate`."""
    return command_for(SimulationSettings, ABOUT, _run, **FILES)


def _run(settings: dict[str, Any], json: Path | None, png: Path | None) -> None:
    require_outputs(json, png)
    found = Simulation.run(SimulationSettings(**settings))
    try:
        if json is not None:
            json.write_text(json_text.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
        if png is not None:
            draw(found, png)
    except OSError as error:
        raise UsageError(str(error)) from error
    typer.echo(str(found))
