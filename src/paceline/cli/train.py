"""`paceline train`."""

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import describe, keyword
from paceline.errors import PacelineError, UsageError
from paceline.train.config import NOT_FINITE_EXIT, TrainConfig, build, from_toml, to_toml

ABOUT = """Train a GPT from scratch on several ranks of this machine, with no download.

Everything has a default: `paceline train` alone trains on Python's own sources for about two minutes."""


def build_train() -> Callable[..., None]:
    """The function that typer reads: one option per setting. An option that is not given leaves the file's value."""

    def train(config: Path | None, print_config: bool, **given: Any) -> None:
        settings = {name: value for name, value in given.items() if value is not None}
        try:
            chosen = build({**base_of(config, settings.get("out")), **settings})
            if print_config:
                typer.echo(to_toml(chosen), nl=False)
                return
            code = start(chosen)
        except PacelineError as error:
            typer.echo(f"paceline train: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
        raise typer.Exit(code)

    parameters = [
        keyword(
            "config", Annotated[Path | None, typer.Option(help="a TOML file with settings; flags win over it")], None
        ),
        keyword(
            "print_config", Annotated[bool, typer.Option("--print-config", help="show the settings as TOML")], False
        ),
    ]
    for item in fields(TrainConfig):
        text = f"{item.metadata['about']} (default {item.default})" if item.default != "" else item.metadata["about"]
        kind = type(item.default)
        parameters.append(keyword(item.name, Annotated[kind | None, typer.Option(help=text, show_default=False)], None))
    describe(train, ABOUT, parameters)
    return train


def base_of(file: Path | None, out: str | None) -> dict[str, Any]:
    """The settings that flags are laid over: those of a file, or of the run that --out names."""
    if file is None and out and (Path(out) / "config.toml").exists():
        found = from_toml(Path(out) / "config.toml")
        return {name: value for name, value in found.items() if name not in ("resume", "out")}
    return from_toml(file) if file else {}


def start(config: TrainConfig) -> int:
    """Run the ranks of a training run under the supervisor, and show what they tell."""
    from paceline.cli.train_screen import closing_words, open_screen
    from paceline.launch import Job, gpu_count, supervise
    from paceline.train.corpus import find_files
    from paceline.train.folder import RunFolder
    from paceline.train.trackers import check_installed

    find_files(config.data)  # before anything is written or started
    check_installed(config)
    gpus = 0 if config.device == "cpu" else gpu_count()
    ranks = config.ranks or gpus or 2
    if config.lanes and ranks > config.lanes:
        raise UsageError(
            f"{ranks} ranks and lanes={config.lanes}: expected at least one lane for each rank; give more --lanes, or "
            f"fewer --ranks"
        )
    config = config.settled(on_gpu=gpus > 0)
    folder = RunFolder.prepare(config)
    job = Job(
        command=(sys.executable, "-m", "paceline.train", str(folder.path)),
        ranks=ranks,
        run_dir=folder.path,
        max_restarts=config.max_restarts,
        final_codes=frozenset({2, NOT_FINITE_EXIT}),  # what a rank refuses it would refuse again
    )
    with open_screen(config, ranks, folder) as screen:
        outcome = supervise(job, screen)
    if outcome.exit_code:
        screen.show_failure(outcome)
        return outcome.exit_code
    return closing_words(folder)
