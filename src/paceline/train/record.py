"""What a step tells: a line in metrics.jsonl, the trackers, and the launcher's screen."""

import json
import math
from dataclasses import dataclass
from typing import TextIO

from paceline.observe.overlap import read_overlap
from paceline.tell import tell
from paceline.trace import Stamp
from paceline.train.config import TrainConfig
from paceline.train.folder import RunFolder
from paceline.train.trackers import Trackers, open_trackers


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """One step of this rank. The loss is the mean over all lanes, or all ranks."""

    step: int
    loss: float
    rate: float
    norm: float
    seconds: float
    data_s: float
    own_tokens: int
    tokens: int  # of all ranks


class Record:
    """All ranks have one: each tells the launcher, rank 0 writes the files."""

    def __init__(self, config: TrainConfig, folder: RunFolder, rank: int) -> None:
        self._writes = rank == 0
        self._path = folder.metrics_file
        self._file: TextIO | None = None  # opened by the first line: a run that resumes replaces the file before it
        self._trackers = open_trackers(config, folder.path) if self._writes else Trackers({})
        self.seconds: list[float] = []
        self.overlaps: list[float] = []
        self.exposed: list[float] = []
        self.blocked: list[float] = []  # seconds that each checkpoint held the training

    def step(self, numbers: StepNumbers, stamps: list[Stamp]) -> None:
        seen = read_overlap(stamps)
        exposed = seen.get("exposed_communication_s", 0.0)
        self.seconds.append(numbers.seconds)
        self.exposed.append(exposed)
        if "overlap" in seen:
            self.overlaps.append(seen["overlap"])
        line = {
            "step": numbers.step,
            "loss": numbers.loss,
            "rate": numbers.rate,
            "norm": numbers.norm,
            "step_s": numbers.seconds,
            "data_s": numbers.data_s,
            "exposed_s": exposed,
            "tokens_per_s": numbers.tokens / numbers.seconds,
        }
        tell("step", **line, own_tokens_per_s=numbers.own_tokens / numbers.seconds)
        self._write(line)

    def held_out(self, step: int, loss: float, loss_per_byte: float) -> None:
        tell("held_out", step=step, loss=loss, per_byte=loss_per_byte)
        self._write({"step": step, "held_out": loss, "held_out_per_byte": loss_per_byte})

    def _write(self, line: dict[str, float]) -> None:
        if not self._writes:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}  # JSON has no NaN
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:  # such as a full disk: the training is worth more than its record
            tell("trouble", text=f"step {line['step']}: {self._path.name} cannot be written: {error.strerror}")
        self._trackers.log({name: value for name, value in line.items() if name != "step"}, int(line["step"]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._trackers.close()
