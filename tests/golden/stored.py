"""A checkpoint and failure capsules that an earlier version has written. They are read, and never written anew."""

import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import PerRank
from tests.golden.files import HERE
from tests.golden.models import WIDTH, Net, build, loss_of, numbers
from tests.golden.training import digest
from tests.pool import Pool

CHECKPOINT = HERE / "checkpoint"
CAPSULES = {"not-finite": HERE / "not-finite.capsule", "crash": HERE / "crash.capsule"}
LANES, SAVED_AT, MORE_STEPS = 4, 3, 2

Microbatch = tuple[torch.Tensor, ...]


# ---- the checkpoint


class Run:
    """A small training run in lanes, so that it goes on with the same bits on any number of ranks."""

    def __init__(self) -> None:
        self.model: Any = paceline.DistributedDataParallel(build("buffers", seed=1), lanes=LANES, seed=3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.9, foreach=False)
        samples = [(numbers(2 * i, WIDTH), numbers(2 * i + 1, WIDTH), torch.tensor(i)) for i in range(29)]
        data = TensorDataset(*(torch.stack(column) for column in zip(*samples, strict=True)))
        self.loader = paceline.Loader[list[Microbatch]](data, batch_size=1, lanes=LANES, seed=5)
        self.seen: list[list[int]] = []  # which samples this rank was dealt, by step

    def go_on(self, first: int, steps: int) -> None:
        batches: Iterator[list[Microbatch]] = iter(self.loader)
        for step in range(first, first + steps):
            self.seen.append([])
            for x, target, index in self.model.lanes(next(batches), step):
                loss_of(self.model(x[0], step), target[0]).backward()
                self.seen[-1].append(int(index))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.loader.close()


def save(rank: int, size: int, folder: str) -> None:
    run = Run()
    run.go_on(0, SAVED_AT)
    with paceline.Checkpointer(folder, asynchronous=False) as checkpoints:
        more: dict[str, Any] = {
            "words": {"said": ["a", 1, 0.1, None]},
            "own": PerRank({"rank": rank, "values": numbers(rank, 3)}),
        }
        checkpoints.save(SAVED_AT, model=run.model, optimizer=run.optimizer, loader=run.loader, **more)


def load(rank: int, size: int, folder: str) -> dict[str, Any]:
    """What is in the checkpoint, and what comes of two more steps."""
    run = Run()
    found = paceline.Checkpointer(folder).load(model=run.model, optimizer=run.optimizer, loader=run.loader)
    own = [[one["rank"], [value.hex() for value in one["values"].tolist()]] for one in found.more["own"]]
    loaded = paceline.digest(run.model, run.optimizer, found.step, run.loader)
    run.go_on(found.step, MORE_STEPS)
    return {
        "step": found.step,
        "world size": found.world_size,
        "words": found.more["words"],
        "own": own,
        "digest": loaded,
        "digest later": digest(run.model.module, run.optimizer),
        "seen": run.seen,
    }


def loaded_on(ranks: int, pool: Pool, folder: Path = CHECKPOINT) -> dict[str, Any]:
    """What all ranks say alike, with the samples that they have seen together."""
    of_ranks = pool(ranks).run(load, str(folder))
    seen = [list(chain.from_iterable(parts)) for parts in zip(*(one.pop("seen") for one in of_ranks), strict=True)]
    assert all(one == of_ranks[0] for one in of_ranks), "ranks have loaded different things"
    return {**of_ranks[0], "seen": seen}


# ---- the capsules


class Picky(Net):
    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        if turn == 2:
            raise ArithmeticError("turn 2 is not for this model")
        return h


def net() -> nn.Module:
    return build(seed=2)


def picky() -> nn.Module:
    model = Picky()
    model.load_state_dict(net().state_dict())
    return model


def loss(model: nn.Module, microbatch: Any) -> torch.Tensor:
    """Of a microbatch of lanes. Outside of lanes the capsule has what forward was given, and no target."""
    x, *more = microbatch
    turn, target = (more[0], x) if len(more) == 1 else (0, more[0])
    return loss_of(model(x, turn), target)


def spoil(rank: int, size: int, folder: str) -> None:
    """The last lane of step 2 has a number that is none."""
    agreement = paceline.Agreement(not_finite="skip", capsules=folder)
    model: Any = paceline.DistributedDataParallel(net(), lanes=LANES, seed=7, agreement=agreement)
    for step in range(3):
        microbatches = [
            (numbers(10 * step + lane, WIDTH), numbers(100 + lane, WIDTH), lane) for lane in model.own_lanes
        ]
        if step == 2 and rank == size - 1:
            microbatches[-1][0][17] = float("nan")
        for microbatch in model.lanes(microbatches, step):
            loss(model, microbatch).backward()
        model.zero_grad()


def crash(rank: int, size: int, folder: str) -> None:
    """Forward raises in the third step."""
    model: Any = paceline.DistributedDataParallel(picky(), agreement=paceline.Agreement(capsules=folder))
    try:
        for step in range(3):
            loss(model, (numbers(step, WIDTH), step)).backward()
            model.zero_grad()
    except ArithmeticError:
        return
    raise AssertionError("it was to crash")


BUILT_BY = {"not-finite": f"{__name__}:net", "crash": f"{__name__}:picky"}


def replay(kind: str) -> int:
    """`paceline replay`, as the command is called. Returns its exit code."""
    from paceline.cli import main

    words = ["paceline", "replay", str(CAPSULES[kind]), "--model", BUILT_BY[kind], "--loss", f"{__name__}:loss"]
    with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", list(sys.path)):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def told(text: str) -> list[str]:
    """What of the words of a replay depends on the capsule alone: its rows, and the verdict."""
    return [" ".join(line.split()) for line in text.splitlines() if line[:1].isdigit() or "reproduced" in line]


# ---- making them


def make(pool: Pool) -> dict[str, Any]:
    """Write all of them, and return what comes of loading the checkpoint."""
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    pool(2).run(save, str(CHECKPOINT))
    (CHECKPOINT / ".lock").unlink()  # it names the process that has saved
    for kind, ranks, failing in (("not-finite", 2, spoil), ("crash", 1, crash)):
        folder = HERE / f"new-{kind}"
        pool(ranks).run(failing, str(folder))
        (file,) = folder.iterdir()
        file.replace(CAPSULES[kind])
        folder.rmdir()
    return {"checkpoint": loaded_on(2, pool)}
