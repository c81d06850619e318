"""`paceline train`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import command_for
from paceline.train.config import NOT_FINITE_EXIT, TrainConfig, build, from_toml, to_toml

if TYPE_CHECKING:
    from paceline.faults.fault import Fault
    from paceline.launch import Job

ABOUT = """Train a GPT from scratch on several ranks of this machine, with no download.

Everything has a default: `paceline train` alone trains on Python's own sources for about two minutes."""


EXTRA = {
    "config": (Path | None, "a TOML file with settings; flags take precedence"),
    "print_config": (bool, "show the settings as TOML, and do nothing else"),
    "engine": (str | None, "where ranks run: local, or ray for a Ray cluster that shares this folder"),
    "fault": (list[str] | None, "inject a fault, such as 'kill rank=1 step=20'; may be repeated"),
}


def build_train() -> Callable[..., None]:
    """The function that typer reads. A setting that is not given is the file's, or has its default."""
    return command_for(TrainConfig, ABOUT, _train, **EXTRA)


def _train(
    settings: dict[str, Any], config: Path | None, print_config: bool, engine: str | None, fault: list[str] | None
) -> None:
    chosen = build({**base_of(config, settings.get("out")), **settings})
    if print_config:
        typer.echo(to_toml(chosen), nl=False)
        return
    raise typer.Exit(start(chosen, tuple(fault or ()), engine or "local"))


def base_of(file: Path | None, out: str | None) -> dict[str, Any]:
    """The settings that flags override: those of a file, or of the run that --out names."""
    if file is None and out and (Path(out) / "config.toml").exists():
        found = from_toml(Path(out) / "config.toml")
        return {name: value for name, value in found.items() if name not in ("resume", "out")}
    return from_toml(file) if file else {}


def start(config: TrainConfig, faults: tuple[str, ...] = (), engine: str = "local") -> int:
    """Run the ranks of a training run, supervised, and show what they report."""
    from paceline.cli.engines import open_engine
    from paceline.cli.train_output import open_output, print_summary
    from paceline.faults.fault import asked_for
    from paceline.launch import gpu_count, supervise
    from paceline.train.corpus import find_files
    from paceline.train.run_folder import RunFolder
    from paceline.train.trackers import check_installed

    find_files(config.data)  # before anything is written or started
    check_installed(config)
    gpus = 0 if config.device == "cpu" else gpu_count()
    ranks = config.ranks or gpus or 2
    config.check_ranks(ranks)
    config = config.settled(on_gpu=gpus > 0)
    folder = RunFolder.prepare(config)
    job = job_of(config, ranks, folder.path, asked_for(os.environ, faults))
    with open_output(config, ranks, folder) as output, open_engine(engine, job, output.note) as where:
        outcome = supervise(job, output, where)
    if outcome.exit_code:
        output.show_failure(outcome)
        return outcome.exit_code
    return print_summary(folder)


def job_of(config: TrainConfig, ranks: int, folder: Path, faults: "tuple[Fault, ...]" = ()) -> "Job":
    """The job of a run in `folder`."""
    from paceline.launch import Job
    from paceline.launch.job import ElasticTerms

    elastic = None
    if config.min_ranks:
        elastic = ElasticTerms(
            minimum=config.min_ranks,
            maximum=ranks,
            spares=config.spares,
            max_losses=None if config.max_losses < 0 else config.max_losses,
            recovery_s=config.recovery_timeout,
        )
    return Job(
        command=(sys.executable, "-m", "paceline.train", str(folder)),
        ranks=ranks,
        elastic=elastic,
        run_dir=folder,
        max_restarts=config.max_restarts,
        hang_timeout_s=None if config.hang_timeout < 0 else config.hang_timeout,
        shutdown_timeout_s=config.shutdown_timeout,
        final_codes=frozenset({2, NOT_FINITE_EXIT}),  # a rank that refuses to start would refuse again
        faults=faults,
    )
