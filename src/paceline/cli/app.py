"""The commands, put together."""

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from paceline.cli.bench import build_bench
from paceline.cli.plan import plan_command
from paceline.cli.train import build_train


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(version_of("paceline"))
        raise typer.Exit


def build_app() -> typer.Typer:
    """A fresh application, so that nothing is registered at import."""
    app = typer.Typer(
        name="paceline",
        help="Data-parallel training for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("train")(build_train())
    app.command("run", add_help_option=False)(_run)
    app.command("plan")(plan_command())
    app.command("doctor")(_doctor)
    app.add_typer(build_bench(), name="bench")
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version.")
    ] = False,
) -> None:
    """Data-parallel training for PyTorch."""


def _run() -> None:
    """Start a script on several ranks, with torchrun's flags. `paceline run --help` lists them."""
    raise AssertionError("`paceline run` is answered before typer is asked")


def _doctor() -> None:
    """Look at this machine: devices, backends, limits, an all-reduce, and what would be chosen and why."""
    from paceline.cli.doctor import main

    raise typer.Exit(main())
