"""The commands, put together."""

import typer

from paceline.cli.bench import build_bench


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
    app.add_typer(build_bench(), name="bench")
    return app


def _root() -> None:
    """Data-parallel training for PyTorch."""
