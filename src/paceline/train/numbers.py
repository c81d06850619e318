"""The numbers of steps: read when it is their time, because to read them waits for the device.

On the CPU that is after every step. On a GPU the host runs ahead of it, so several steps are read together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import paceline
from paceline.train.record import StepNumbers
from paceline.train.run import Run

TOGETHER = 10  # steps on a GPU
ALONE_UNTIL = 5  # the first steps are read one by one: whoever watches wants to see that it runs


@dataclass(frozen=True, slots=True)
class Unread:
    """One step of this rank, whose numbers are where they were computed."""

    step: int
    rate: float
    losses: torch.Tensor  # of each of this rank's lanes, or of its batch
    norm: torch.Tensor
    data_s: float
    own_tokens: int


def due(run: Run) -> bool:
    """Whether the numbers of the last steps are to be read now. The same on all ranks."""
    return run.device.type == "cpu" or run.step <= ALONE_UNTIL or run.step % TOGETHER == 0


def read_numbers(run: Run) -> None:
    """Read and record the steps that were not read yet. All ranks call it after the same step."""
    steps, run.unread = run.unread, []
    if not steps:
        return
    losses = torch.stack([step.losses for step in steps]).tolist()
    norms = torch.stack([step.norm for step in steps]).tolist()
    means = over_ranks(run, losses)
    now = time.perf_counter()
    seconds, run.read_at = (now - run.read_at) / len(steps), now
    tokens = run.config.samples_of_step(run.world.size) * run.config.shape.context
    stamps = run.model.trace.stamps()
    for step, loss, norm in zip(steps, means, norms, strict=True):
        numbers = StepNumbers(step.step, loss, step.rate, norm, seconds, step.data_s, step.own_tokens, tokens)
        run.record.step(numbers, stamps)


def over_ranks(run: Run, losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean loss of all lanes, for each step.

    It is the same number in every world: each lane has a place of its own in what is summed, where all other ranks have
    zero.
    """
    rank, size = run.world.rank, run.world.size
    own, count = (run.model.own_lanes, run.config.lanes) if run.config.lanes else (range(rank, rank + 1), size)
    numbers = torch.zeros(len(losses), count, dtype=torch.float64, device="cpu")
    numbers[:, own.start : own.stop] = torch.tensor(losses, dtype=torch.float64, device="cpu")
    if size > 1:
        paceline.all_reduce(numbers, "sum")
    return [sum(row) / count for row in numbers.tolist()]
