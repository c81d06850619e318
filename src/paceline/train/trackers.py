"""Thin adapters to experiment trackers. Each is loaded when it is asked for by name."""

import importlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from paceline.errors import UsageError
from paceline.train.config import TrainConfig


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


def open_trackers(config: TrainConfig, folder: Path) -> list[Tracker]:
    """Those that the configuration names."""
    return [_open(name, config, folder) for name in check_installed(config)]


def _open(name: str, config: TrainConfig, folder: Path) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(config, folder)
    return MLflow(config, folder) if name == "mlflow" else RunTracker(name, config, folder)
