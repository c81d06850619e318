"""Thin adapters for experiment trackers. Each is imported only if it is asked for, and none can end the training."""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.errors import UsageError
from paceline.train.config import TrainConfig

logger = logging.getLogger("paceline")

T = TypeVar("T")
FAILURES = 3  # in a row; a server that is down may block each call for minutes


class Tracker(NamedTuple):
    """Takes the numbers of every step."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def open_tensorboard(config: TrainConfig, folder: Path) -> Tracker:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("config", str(asdict(config)))

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def open_wandb(library_name: str, config: TrainConfig, folder: Path) -> Tracker:
    """Weights & Biases, and trackio, which has the same three calls."""
    library = importlib.import_module(library_name)
    library.init(project="paceline", name=folder.name, config=asdict(config))
    return Tracker(lambda numbers, step: library.log(dict(numbers), step=step), library.finish)


def open_mlflow(config: TrainConfig, folder: Path) -> Tracker:
    library = importlib.import_module("mlflow")
    library.start_run(run_name=folder.name)
    library.log_params(asdict(config))
    return Tracker(lambda numbers, step: library.log_metrics(dict(numbers), step=step), library.end_run)


OPENERS: Mapping[str, Callable[[TrainConfig, Path], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": partial(open_wandb, "wandb"),
    "trackio": partial(open_wandb, "trackio"),
    "mlflow": open_mlflow,
}


def check_installed(config: TrainConfig) -> list[str]:
    """The trackers that the configuration names. One that is not installed is refused before anything starts."""
    names = [name.strip() for name in config.trackers.split(",") if name.strip()]
    for name in names:
        if name not in OPENERS:
            known = ", ".join(OPENERS)
            raise UsageError(f"trackers={config.trackers!r}: {name!r} is not known; expected some of {known}")
        if find_spec(name) is None:
            raise UsageError(f"the tracker {name} is not installed: pip install {name}, or leave it out")
    return names


class Trackers:
    """The trackers of a run. One that raises is reported once, and dropped after FAILURES failures in a row.

    `makers` are called here, by name, so that a tracker which cannot be made is handled in the same way.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._living: dict[str, Tracker] = {}
        self._failures: dict[str, int] = dict.fromkeys(makers, 0)
        self._reported: set[str] = set()
        for name, make in makers.items():
            if (tracker := self._attempt(name, "could not be started", make)) is not None:
                self._living[name] = tracker

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Give the numbers of a step to every tracker that still works."""
        for name, tracker in list(self._living.items()):
            self._attempt(name, f"failed at step {step}", tracker.log, numbers, step)
            if self._failures[name] >= FAILURES:
                del self._living[name]

    def close(self) -> None:
        """Close them all; called once, at the end of the run."""
        for name, tracker in self._living.items():
            self._attempt(name, "could not be closed", tracker.close)
        self._living.clear()

    def _attempt(self, name: str, what: str, call: Callable[..., T], *args: object) -> T | None:
        try:
            found = call(*args)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training is worth more
            self._failures[name] += 1
            if name not in self._reported:
                self._reported.add(name)
                logger.warning(
                    "the tracker %s %s (%s: %s); training continues, and metrics.jsonl has every number",
                    name,
                    what,
                    type(error).__name__,
                    error,
                )
            return None
        self._failures[name] = 0
        return found


def open_trackers(config: TrainConfig, folder: Path) -> Trackers:
    """Those that the configuration names."""
    return Trackers({name: partial(OPENERS[name], config, folder) for name in check_installed(config)})
