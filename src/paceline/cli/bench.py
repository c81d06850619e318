"""`paceline bench`."""

from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from paceline.bench.command import FILES, Command, conduct, exit_code
from paceline.bench.commands import COMMANDS
from paceline.bench.tables import render
from paceline.cli.options import PlainCommand, PlainGroup, command_for


def build_bench() -> typer.Typer:
    app = typer.Typer(
        cls=PlainGroup,
        help="Compare paceline with its peers, interleaved in one run. Without a command: `step`, in about a minute.",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_step_by_default)
    files = {name: (Path | None, about) for name, about in FILES.items()}
    for command in COMMANDS.values():
        described = command_for(command.spec, command.about, partial(_run, command), **files)
        app.command(command.name, cls=PlainCommand)(described)
    return app


def _step_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        _run(COMMANDS["step"], {})


def _run(command: Command, settings: dict[str, Any], json: Path | None = None, png: Path | None = None) -> None:
    progress = Console(stderr=True, highlight=False)
    try:
        with progress.status("starting") as status:
            report = conduct(command, settings, status.update if progress.is_terminal else progress.print, json, png)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    for table in command.tables(report):
        typer.echo(render(table) + "\n")
    raise typer.Exit(exit_code(report))
