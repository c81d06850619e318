"""`paceline plan`."""

import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from paceline.cli.options import command_for
from paceline.errors import PacelineError
from paceline.memory_plan.files import require_picture, require_place
from paceline.memory_plan.settings import PlanSettings

FILES = {
    "json": (Path | None, "write all figures to this file"),
    "png": (Path | None, "draw a bar chart into this file (needs matplotlib)"),
}
ABOUT = """Memory and traffic of training a transformer, from its numbers alone: nothing is built, no torch is loaded.

For a model of your own: paceline.plan(model, batch)."""


def plan_command() -> Callable[..., None]:
    """The function that typer reads; register it as `plan`."""
    return command_for(PlanSettings, ABOUT, _run, **FILES)


def _run(settings: dict[str, Any], json: Path | None = None, png: Path | None = None) -> None:
    from rich.console import Console

    try:
        if json is not None:
            require_place("json", json)
        if png is not None:
            require_picture("png", png)
        plan = PlanSettings(**settings).plan()
        if json is not None:
            json.write_text(json_text.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
        if png is not None:
            plan.chart(png)
    except (PacelineError, OSError) as error:
        Console(stderr=True, highlight=False).print(
            f"paceline plan: {error}", style="red", soft_wrap=True, markup=False
        )
        raise typer.Exit(2) from None
    Console(highlight=False).print(str(plan), soft_wrap=True, markup=False)
