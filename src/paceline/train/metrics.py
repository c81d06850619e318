"""The numbers of every step: a line in metrics.jsonl, the trackers, and the launcher's display.

Reading a number waits for the device. On the CPU that is done after every step; on a GPU the host runs ahead, so the
numbers of several steps are read together. Of those, the last one is traced with the times of the device, and stands
for all: each of these times costs the device an event.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

import paceline
from paceline.observe.timeline import read_overlap
from paceline.rank_report import report
from paceline.stored.directory import SHARED, open_to_write
from paceline.trace import Stamp
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder
from paceline.train.trackers import Trackers, open_trackers

READ_TOGETHER = 10  # steps on a GPU
READ_ALONE_UNTIL = 5  # the first steps are read one by one: a user who watches wants to see that the run works


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """One step of this rank, whose numbers are still on the device."""

    step: int
    rate: float
    losses: torch.Tensor  # of each of this rank's lanes, or of its batch
    norm: torch.Tensor
    data_s: float
    own_tokens: int


class RunMetrics:
    """All ranks have one: each reports to the launcher, and rank 0 writes the files."""

    def __init__(self, config: TrainConfig, folder: RunFolder, world: paceline.World, model: Any) -> None:
        self._config = config
        self._world = world
        self._model = model
        self._folder = folder
        self._path = folder.metrics_file
        self._file: TextIO | None = None  # opened by the first line: a resumed run replaces the file before that
        self._trackers: Trackers | None = None
        self._unread: list[UnreadStep] = []
        self._read_at = 0.0
        self.seconds: list[float] = []
        self.overlaps: list[float] = []
        self.exposed: list[float] = []
        self.blocked: list[float] = []  # seconds that each checkpoint blocked the training

    def begin_step(self, step: int) -> float:
        """Returns the time. Work between steps, such as a checkpoint, is not counted."""
        self._model.trace.device_times = self.due(step)
        now = time.perf_counter()
        if not self._unread:
            self._read_at = now
        return now

    def open(self) -> None:
        """The world has formed, perhaps again: drop unread steps, which some ranks no longer have."""
        self._unread.clear()
        if self._trackers is None and self._world.rank == 0:
            self._trackers = open_trackers(self._config, self._folder.path)

    def end_step(self, step: UnreadStep) -> None:
        self._unread.append(step)

    def due(self, step: int) -> bool:
        """Whether numbers are to be read after this step. The same on all ranks."""
        return self._world.device.type == "cpu" or step <= READ_ALONE_UNTIL or step % READ_TOGETHER == 0

    def read(self) -> None:
        """Read and record the steps that have not been read yet. All ranks call it after the same step."""
        steps, self._unread = self._unread, []
        if not steps:
            return
        losses = self._mean_losses(torch.stack([step.losses for step in steps]).tolist())
        norms = torch.stack([step.norm for step in steps]).tolist()
        now = time.perf_counter()
        seconds, self._read_at = (now - self._read_at) / len(steps), now
        stamps = self._model.trace.stamps()
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            self._record(step, loss, norm, seconds, stamps)

    def _mean_losses(self, losses: Sequence[Sequence[float]]) -> list[float]:
        """The mean loss of all lanes, or of all ranks, for each step.

        It is the same number in every world: each lane has a place of its own in what is summed, where all other ranks
        have zero.
        """
        rank, size = self._world.rank, self._world.size
        own, count = (
            (self._model.own_lanes, self._config.lanes) if self._config.lanes else (range(rank, rank + 1), size)
        )
        numbers = torch.zeros(len(losses), count, dtype=torch.float64, device="cpu")
        numbers[:, own.start : own.stop] = torch.tensor(losses, dtype=torch.float64, device="cpu")
        if size > 1:
            paceline.all_reduce(numbers, "sum")
        return [sum(row) / count for row in numbers.tolist()]

    def _record(self, step: UnreadStep, loss: float, norm: float, seconds: float, stamps: list[Stamp]) -> None:
        seen = read_overlap(stamps)
        exposed = seen.get("exposed_communication_s", 0.0)
        self.seconds.append(seconds)
        self.exposed.append(exposed)
        if "overlap" in seen:
            self.overlaps.append(seen["overlap"])
        tokens = self._config.samples_of_step(self._world.size) * self._config.shape.context
        line = {
            "step": step.step,
            "loss": loss,
            "rate": step.rate,
            "norm": norm,
            "step_s": seconds,
            "data_s": step.data_s,
            "exposed_s": exposed,
            "tokens_per_s": tokens / seconds,
        }
        report("step", **line, own_tokens_per_s=step.own_tokens / seconds)
        self._write(line)

    def held_out(self, step: int, loss: float, loss_per_byte: float) -> None:
        """Record an evaluation on held-out text."""
        report("held_out", step=step, loss=loss, per_byte=loss_per_byte)
        self._write({"step": step, "held_out": loss, "held_out_per_byte": loss_per_byte})

    def _write(self, line: dict[str, float]) -> None:
        if self._world.rank != 0:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}  # JSON has no NaN
        try:
            if self._file is None:
                self._file = os.fdopen(open_to_write(self._path, append=True, mode=SHARED), "a", encoding="utf-8")
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:  # such as a full disk: the training is worth more than its metrics
            report("trouble", text=f"step {line['step']}: {self._path.name} cannot be written: {error.strerror}")
        if self._trackers is not None:
            self._trackers.log({name: value for name, value in line.items() if name != "step"}, int(line["step"]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()
