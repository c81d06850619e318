"""The commands, put together."""

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.__main__ import ABOUT as BENCH
from paceline.cli.options import PlainCommand, PlainGroup
from paceline.cli.plan_command import plan_command
from paceline.cli.simulate_command import simulate_command
from paceline.cli.train import build_train

# What `paceline.cli` hands to a parser of its own, before typer runs; typer lists it.
ELSEWHERE = {
    "run": "Run a script on several ranks, with torchrun's flags. `paceline run --help` lists them.",
    "doctor": "Examine this machine or, with --determinism, whether a script gives the same bits twice.",
    "bench": BENCH,
}


def _elsewhere() -> None:
    raise AssertionError("this command is handled before typer runs")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(version_of("paceline"))
        raise typer.Exit


def build_app() -> typer.Typer:
    """A fresh application, so that nothing is registered at import."""
    app = typer.Typer(
        name="paceline",
        cls=PlainGroup,
        help="Data-parallel training for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("train", cls=PlainCommand)(build_train())
    app.command("plan", cls=PlainCommand)(plan_command())
    app.command("simulate", cls=PlainCommand)(simulate_command())
    app.command("replay", cls=PlainCommand)(_replay)
    for name, about in ELSEWHERE.items():
        app.command(name, help=about, add_help_option=False)(_elsewhere)
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version.")
    ] = False,
) -> None:
    """Data-parallel training for PyTorch."""


def _replay(
    file: Annotated[Path, typer.Argument(help="a failure capsule", metavar="FILE")],
    model: Annotated[str | None, typer.Option(help="module:function that returns the model, if it is your own")] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="module:function(model, microbatch) that returns the loss; by default, the mean of the outputs. With "
            "lanes, the microbatch is what model.lanes() yielded; otherwise it is the tuple of forward's arguments"
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: the device that the capsule was made on")
    ] = None,
) -> None:
    """Replay the step of a failure capsule. Exit status 0 if the failure was reproduced, 1 if not, 2 if unusable."""
    from paceline.cli.replay import main

    raise typer.Exit(main(file, model, loss, device))
