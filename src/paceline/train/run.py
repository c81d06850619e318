"""All that a rank holds while it trains."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.checks import Checks
from paceline.train.config import TrainConfig
from paceline.train.folder import RunFolder
from paceline.train.model import GPT
from paceline.train.record import Record
from paceline.train.text import Text

if TYPE_CHECKING:
    import paceline
    from paceline.train.numbers import Unread


@dataclass
class Run:
    """One rank of one run. `step` and what follows it change; the rest changes inside."""

    config: TrainConfig
    folder: RunFolder
    world: "paceline.World"
    text: Text
    net: GPT
    model: Any  # the net in paceline's class, compiled or not
    optimizer: torch.optim.Optimizer
    loader: "paceline.Loader[Any]"  # of micros, or with lanes of lists of them
    checkpoints: "paceline.Checkpointer"
    record: Record
    checks: Checks
    step: int = 0
    saved_at: int | None = None
    resumed_from: int | None = None
    redone: int = 0  # steps that an earlier attempt had made after the checkpoint
    unread: "list[Unread]" = field(default_factory=list)  # steps whose numbers nobody has read
    read_at: float = field(default_factory=time.perf_counter)  # when the last ones were read

    @property
    def device(self) -> torch.device:
        return self.world.device
