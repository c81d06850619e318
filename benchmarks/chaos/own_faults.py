"""The settings of `job.py`, and the faults that its script has by itself."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.collectives import TorchDistTransport
from paceline.collectives.protocols import Work
from paceline.progress import own_progress


@dataclass(frozen=True)
class Settings:
    """What the job is given."""

    way: str
    folder: Path
    workers: int
    transport: str
    timeout: float
    samples: int
    own_folders: bool
    audit_every: int
    checksums: bool
    swap: int | None
    flip_on_wire: int | None

    def own_folder(self, rank: int) -> Path:
        """Of the checkpoints that a rank sees."""
        return self.folder / f"rank-{rank}" if self.own_folders else self.folder


def say(*words: object) -> None:
    """For the conductor."""
    sys.stdout.write(f"chaos: {' '.join(map(str, words))}\n")
    sys.stdout.flush()


def swap_sums(settings: Settings, rank: int, step: int, all_reduce: Callable[[torch.Tensor], object]) -> None:
    """Two sums of one shape, which the ranks ask for in different order."""
    if step != settings.swap:
        return
    say("injected fault: two sums are swapped")
    first, second = torch.ones(1), torch.full((1,), 10.0)
    if rank == 0:
        all_reduce(first)
        all_reduce(second)
    else:
        all_reduce(second)
        all_reduce(first)


def flips_now(settings: Settings) -> bool:
    """Once in a job, on its last rank."""
    last = int(os.environ["RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    if not last or own_progress().step < (settings.flip_on_wire or 0):
        return False
    try:
        (settings.folder / "flipped").touch(exist_ok=False)
    except FileExistsError:
        return False
    say("injected fault: a bit flips on the wire")
    return True


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int32)[-1] ^= 1 << 13


class Arriving:
    """A collective of gloo, and one bit of what it has received flips as it is complete."""

    def __init__(self, work: Work, received: torch.Tensor) -> None:
        self._work, self._received, self._flipped = work, received, False

    def done(self) -> bool:
        return self._work.done()

    def wait(self, seconds: float) -> bool:
        if not self._work.wait(seconds):
            return False
        if not self._flipped:
            self._flipped = True
            flip(self._received)
        return True


def spoil_what_arrives(settings: Settings) -> None:
    """Of what lanes exchange."""
    exchange = TorchDistTransport.all_to_all

    def spoilt(self: TorchDistTransport, out: torch.Tensor, flat: torch.Tensor) -> Work:
        work = exchange(self, out, flat)
        return Arriving(work, out) if out.is_floating_point() and flips_now(settings) else work

    TorchDistTransport.all_to_all = spoilt  # type: ignore[method-assign]


def spoil_what_is_sent(settings: Settings, _: object, bucket: Any) -> Any:
    """The sum that torch's ranks get is then that of a message that was damaged on its way."""
    if flips_now(settings):
        flip(bucket.buffer())
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]
