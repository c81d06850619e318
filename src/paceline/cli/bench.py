"""`paceline bench`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.commands import COMMANDS, Command, conduct, exit_code
from paceline.cli.options import PlainCommand, PlainGroup, command_for
from paceline.errors import PacelineError

FILES = {
    "json": (Path | None, "write the report, with every sample, to this file"),
    "png": (Path | None, "draw a chart into this file (needs matplotlib)"),
}


def build_bench() -> typer.Typer:
    app = typer.Typer(
        cls=PlainGroup,
        help="Measure paceline beside its peers, in turns, in one run. Without a command: `step`, in about a minute.",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_quick)
    for command in COMMANDS:
        described = command_for(command.spec, command.about, partial(_run, command), **FILES)
        app.command(command.name, cls=PlainCommand)(described)
    return app


def _quick(
    context: typer.Context,
    lanes: Annotated[bool, typer.Option("--lanes", help="what lanes cost: the same as the command `lanes`")] = False,
) -> None:
    if context.invoked_subcommand is None:
        _run(next(command for command in COMMANDS if command.name == ("lanes" if lanes else "step")), {})
    elif lanes:
        name = context.invoked_subcommand
        wanted = "paceline bench step --lanes" if name == "step" else "paceline bench lanes"
        typer.echo(f"paceline bench: --lanes stands before the command {name!r}; expected: {wanted}", err=True)
        raise typer.Exit(2)


def _run(command: Command, settings: dict[str, Any], json: Path | None = None, png: Path | None = None) -> None:
    from rich.console import Console

    from paceline.cli.show import show_table

    progress = Console(stderr=True, highlight=False)
    console = Console(highlight=False)
    try:
        with progress.status("starting") as status:
            report = conduct(command, settings, status.update if progress.is_terminal else progress.print, json, png)
    except PacelineError as error:
        progress.print(f"paceline bench {command.name}: {error}", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    for table in command.tables(report):
        show_table(console, table)
    raise typer.Exit(exit_code(report))
