"""The folder of one run, and the files in it. Needs no torch."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import Malformed, UsageError
from paceline.stored.directory import DirectoryLock, make_directory, replace_file
from paceline.train.config import TrainConfig, build, from_toml, to_toml
from paceline.typed_json import read_json, shown

_TABLE: Any = dict[str, Any]


class RunFolder:
    """runs/<id>: config.toml, metrics.jsonl, result.json, loss.png, report.html, checkpoints/, one log per rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics_file = path / "metrics.jsonl"
        self.result_file = path / "result.json"
        self.picture_file = path / "loss.png"
        self.report_file = path / "report.html"
        self.weights_file = path / "weights.safetensors"
        self.checkpoints = path / "checkpoints"
        self.capsules = path / "capsules"  # of steps that went wrong
        self._lock = DirectoryLock(path)

    @classmethod
    def prepare(cls, config: TrainConfig) -> "RunFolder":
        """Create the folder of a new run, or continue the run that is in it. Nothing is overwritten."""
        folder = cls(Path(config.out) if config.out else _new_name())
        if folder.path.exists() and not folder.path.is_dir():
            raise UsageError(f"out={str(folder.path)!r} is not a folder; expected a new or empty one, or that of a run")
        if folder.config_file.exists():
            folder._check_same_run(config)
        elif folder.path.exists() and any(folder.path.iterdir()):
            raise UsageError(f"out={str(folder.path)!r} is not empty and holds no run; expected a new or empty folder")
        try:
            make_directory(folder.checkpoints)
            folder._own()
            replace_file(folder.config_file, [to_toml(folder._with_schedule(config)).encode()])
        except OSError as error:
            raise UsageError(
                f"the run's folder {folder.path} cannot be written: {error.strerror}; give another --out"
            ) from error
        return folder

    def _own(self) -> None:
        """Keep others from training in the same folder for as long as this launcher runs."""
        if holder := self._lock.acquire():
            raise UsageError(
                f"another `paceline train` is running in {self.path} ({holder}); choose another --out, or wait"
            )

    def release(self) -> None:
        """Let others train here."""
        self._lock.release()

    def config(self) -> TrainConfig:
        return build(from_toml(self.config_file))

    def _has_begun(self) -> bool:
        """Whether the run in it got as far as its first step."""
        return any(self.checkpoints.glob("step-*")) or self.metrics_file.exists()

    def _with_schedule(self, config: TrainConfig) -> TrainConfig:
        """A run that is made longer or shorter keeps the learning rates it was started with, unless told otherwise."""
        if config.decay_steps or not self._has_begun():
            return config
        before = self.config()
        return replace(config, decay_steps=before.decay_steps or (before.steps if before.steps != config.steps else 0))

    def _check_same_run(self, config: TrainConfig) -> None:
        if not self._has_begun():
            return
        if config.resume == "never":
            raise UsageError(
                f"{self.path} already holds a run, which resume='never' would overwrite; choose another --out, or "
                f"continue it with resume='auto'"
            )
        before = self.config()
        for name in TrainConfig.__dataclass_fields__:
            old, new = getattr(before, name), getattr(config, name)
            if name not in TrainConfig.FREE and old != new:
                raise UsageError(
                    f"the run in {self.path} was started with {name}={old!r}, got {name}={new!r}; it can only be "
                    f"resumed with the same value: expected {name}={old!r}, or another --out"
                )

    def write_result(self, result: Mapping[str, Any]) -> None:
        replace_file(self.result_file, [json.dumps(result, indent=1).encode(), b"\n"])

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(_TABLE, self.result_file.read_bytes(), f"{self.result_file}: a run's result")
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """The lines written so far; one that a kill or a full disk has cut short is left out."""
        if not self.metrics_file.exists():
            return []
        whole = [line for line in self.metrics_file.read_bytes().split(b"\n") if line.endswith(b"}")]
        lines: list[dict[str, Any]] = [
            read_json(_TABLE, line, f"{self.metrics_file}: the numbers of a step") for line in whole
        ]
        for line in lines:
            if type(line.get("step")) is not int:
                raise Malformed(f"{self.metrics_file}: expected the numbers of a step, got {shown(line)}")
        return lines

    def cut_metrics(self, step: int) -> int:
        """Drop what was written after `step`, from which the run resumes. Returns how many steps that were."""
        lines = self.metrics()
        kept = [line for line in lines if line["step"] <= step]
        if self.metrics_file.exists():
            replace_file(self.metrics_file, [f"{json.dumps(line)}\n".encode() for line in kept])
        return max(0, max((line["step"] for line in lines), default=0) - step)


def _new_name() -> Path:
    """runs/<date>-<time>, with a number behind it if two runs begin in the same second."""
    base = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path
