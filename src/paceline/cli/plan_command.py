"""`paceline plan`."""

import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from paceline.cli.options import command_for
from paceline.errors import UsageError
from paceline.memory_plan.closed_form import PlanSettings
from paceline.memory_plan.plan_chart import require_outputs

FILES = {
    "json": (Path | None, "write all figures to this file"),
    "png": (Path | None, "draw a bar chart into this file (needs matplotlib)"),
}
ABOUT = """Say whether a transformer fits, from its numbers alone, and what it needs: memory and traffic of every rank.

Nothing is built and torch is not loaded. For a model of your own: paceline.plan(model, batch)."""


def plan_command() -> Callable[..., None]:
    """The function that typer reads; register it as `plan`."""

    def transformer_first(name: str) -> bool:
        return name not in PlanSettings.__annotations__

    return command_for(PlanSettings, ABOUT, _run, transformer_first, **FILES)


def _run(settings: dict[str, Any], json: Path | None, png: Path | None) -> None:
    require_outputs(json, png)
    plan = PlanSettings(**settings).plan()
    try:
        if json is not None:
            json.write_text(json_text.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
        if png is not None:
            plan.chart(png)
    except OSError as error:
        raise UsageError(str(error)) from error
    typer.echo(str(plan))
