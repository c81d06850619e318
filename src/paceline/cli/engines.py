"""The engine that `--engine` names."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import UsageError
from paceline.launch import Job, RankEngine

NAMES = ("local", "ray")


@contextmanager
def engine_for(flags: argparse.Namespace, job: Job, note: Callable[[str], None]) -> Iterator[RankEngine | None]:
    """The engine that the flags of `paceline run` ask for; None is this machine."""
    needs = {name: _share(name, getattr(flags, f"{name}_per_rank")) for name in ("cpus", "gpus")}
    if given := [name for name, share in needs.items() if share is not None and flags.engine != "ray"]:
        raise UsageError(f"--{given[0]}-per-rank needs --engine ray: on one machine all ranks share its CPUs and GPUs")
    with open_engine(flags.engine, job, note, cpus=needs["cpus"], gpus=needs["gpus"]) as engine:
        yield engine


@contextmanager
def open_engine(
    name: str, job: Job, note: Callable[[str], None], *, cpus: float | None = None, gpus: float | None = None
) -> Iterator[RankEngine | None]:
    """The engine of this name; None is this machine."""
    if name not in NAMES:
        raise UsageError(f"--engine {name}: expected {' or '.join(NAMES)}")
    if name == "local":
        yield None
        return
    from paceline.ray.cluster_engine import ray_engine

    with ray_engine(job, note, cpus_per_rank=1.0 if cpus is None else cpus, gpus_per_rank=gpus) as engine:
        yield engine


def _share(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6 or (name == "cpus" and share == 0):
        raise UsageError(f"--{name}-per-rank {text}: expected a number{' above 0' if name == 'cpus' else ''}")
    return share
