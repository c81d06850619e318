"""Thin adapters to experiment trackers. Each is loaded when it is asked for by name, and none can end the training."""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeVar

from paceline.errors import UsageError
from paceline.train.config import TrainConfig

logger = logging.getLogger("paceline")

T = TypeVar("T")
FAILURES = 3  # in a row; a server that is down may hold each call for minutes


class Tracker(Protocol):
    """Gets the numbers of every step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, config: TrainConfig, folder: Path) -> None:
        library = importlib.import_module("torch.utils.tensorboard")
        self._writer = library.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", str(asdict(config)))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class RunTracker:
    """Weights & Biases, and trackio, which has the same three calls."""

    def __init__(self, library: str, config: TrainConfig, folder: Path) -> None:
        self._library = importlib.import_module(library)
        self._library.init(project="paceline", name=folder.name, config=asdict(config))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._library.log(dict(numbers), step=step)

    def close(self) -> None:
        self._library.finish()


class MLflow:
    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._library = importlib.import_module("mlflow")
        self._library.start_run(run_name=folder.name)
        self._library.log_params(asdict(config))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._library.end_run()


NAMES = ("tensorboard", "wandb", "trackio", "mlflow")


def check_installed(config: TrainConfig) -> list[str]:
    """The trackers that the configuration names; one that cannot be had is refused before anything is started."""
    names = [name.strip() for name in config.trackers.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
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
                    "the tracker %s %s (%s: %s); training goes on, and what it misses is in metrics.jsonl",
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
    return Trackers({name: partial(_open, name, config, folder) for name in check_installed(config)})


def _open(name: str, config: TrainConfig, folder: Path) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(config, folder)
    return MLflow(config, folder) if name == "mlflow" else RunTracker(name, config, folder)
