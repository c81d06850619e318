"""The training that faults come to, in three ways. Run by `conduct.py`; all ways have the same model, data and steps.

    elastic    paceline.Elastic: who survives goes on, and from the newest checkpoint if nobody does
    restart    paceline.DistributedDataParallel and Checkpointer: all ranks start again from the newest checkpoint
    torch      torch's DistributedDataParallel and torch.save: the same, as torch's documents have it

Faults come by PACELINE_FAULTS. The torch way notes its phases by itself, so they happen in the same places there.
"""

import argparse
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from own_faults import Settings, say, spoil_what_arrives, spoil_what_is_sent, swap_sums
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline
from paceline.progress import Phase, own_progress

LANES, BATCH, SAVE_EVERY = 6, 2, 10
SAMPLES = 4096
COLLECTIVE_S = 20.0  # that ours may take
PAUSE_S = 0.03  # of a step: ten thousand steps a minute are no training


@dataclass(frozen=True)
class Samples(Dataset[torch.Tensor]):
    """Numbers that follow from their index."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, 1 + index % 17, 32)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(batch), batch[:, :8])


@dataclass(frozen=True)
class Length:
    """How long training is: so many steps, or the number in a file that comes to be there while it runs."""

    steps: int
    pause_s: float
    until: Path | None

    def reached(self, step: int) -> bool:
        if self.until is not None and self.until.exists():
            return step >= int(self.until.read_text())
        return step >= self.steps


def ours(length: Length, settings: Settings) -> None:
    """Lanes, checkpoints, an agreement, and a stop on request."""
    world = paceline.init(device="cpu")
    model, optimizer, loader = made(settings)
    checkpoints = checkpointer(settings, world.rank)
    step = 0
    try:
        step = checkpoints.load("compared", model=model, optimizer=optimizer, loader=loader).step
    except paceline.NoCheckpoint:
        say("begins")
    with paceline.Preemption() as preemption:
        batches = loader.endless()
        while not length.reached(step):
            time.sleep(length.pause_s)
            swap_sums(settings, world.rank, step, paceline.all_reduce)
            for batch in model.lanes(next(batches), step):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            loader.commit(step)
            told(world.rank, step)
            stops = preemption.agreed()
            if stops or checkpoints.due(step):
                tell_problem(checkpoints.save(step, model=model, optimizer=optimizer, loader=loader))
            if stops:
                checkpoints.wait()
                say("stopped at", step)
                sys.exit(143)
    say("digest", paceline.digest(model, optimizer, step))
    paceline.shutdown()


def elastic(length: Length, settings: Settings) -> None:
    """Who survives goes on."""
    paceline.init(device="cpu")
    model, optimizer, loader = made(settings)
    checkpoints = checkpointer(settings, int(os.environ["RANK"]))
    preemption = paceline.Preemption()
    run = paceline.Elastic(
        model=model, optimizer=optimizer, loader=loader, checkpoints=checkpoints, preemption=preemption
    )
    batches = loader.endless()
    while not length.reached(run.step) and not preemption.agreed():
        time.sleep(length.pause_s)
        with run.attempt():
            swap_sums(settings, rank_now(), run.step, paceline.all_reduce)
            for batch in model.lanes(next(batches), run.step):
                loss_of(model, batch).backward()
            with run.commit():
                optimizer.step()
            told(rank_now(), run.step)
            optimizer.zero_grad()
            if checkpoints.due(run.step):
                tell_problem(checkpoints.save(run.step, **run.declared))
    stopped = not length.reached(run.step)
    saved = not stopped
    while not saved:
        with run.attempt():
            tell_problem(checkpoints.save(run.step, **run.declared))
            saved = True
    run.finish()
    checkpoints.wait()
    if stopped:
        say("stopped at", run.step)
        sys.exit(143)
    say("digest", paceline.digest(model, optimizer, run.step))
    paceline.shutdown()


def made(settings: Settings) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    agreement = paceline.Agreement(
        state_every=4, not_finite="skip", audit_every=settings.audit_every, checksums=settings.checksums
    )
    if settings.flip_on_wire is not None:
        spoil_what_arrives(settings)
    net = network()
    model: Any = paceline.DistributedDataParallel(
        net, lanes=LANES, seed=5, transport=settings.transport, timeout=COLLECTIVE_S, agreement=agreement
    )
    loader: Any = paceline.Loader(
        Samples(settings.samples), BATCH, lanes=LANES, seed=3, num_workers=settings.workers, manual_commit=True
    )
    return model, optimizer_of(model), loader


def checkpointer(settings: Settings, rank: int) -> paceline.Checkpointer:
    folder = settings.own_folder(rank) / "checkpoints"
    return paceline.Checkpointer(folder, every_steps=SAVE_EVERY, timeout=COLLECTIVE_S)


def torchs(length: Length, settings: Settings) -> None:
    """What torch's documents say: DDP, a sampler, and a file that the next attempt begins from."""
    note = own_progress().note
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = optimizer_of(model)
    if settings.flip_on_wire is not None:
        model.register_comm_hook(None, partial(spoil_what_is_sent, settings))
    samples = Samples(settings.samples)
    sampler: Any = DistributedSampler(samples, seed=3)
    if settings.samples != SAMPLES:  # ranks that have data of their own
        sampler = OwnSamples(range(rank, settings.samples, dist.get_world_size()))
    loader = DataLoader(samples, BATCH * LANES // dist.get_world_size(), sampler=sampler, num_workers=settings.workers)
    file, step = settings.own_folder(rank) / "checkpoint.pt", 0
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while not length.reached(step):
        sampler.set_epoch(step // len(loader))
        for number, batch in enumerate(loader):
            if number < step % len(loader):
                continue
            time.sleep(length.pause_s)
            swap_sums(settings, rank, step, dist.all_reduce)
            torch.manual_seed(step * 1000 + rank)
            note(Phase.FORWARD, step)
            loss = loss_of(model, batch)
            note(Phase.BACKWARD)
            loss.backward()
            note(Phase.OPTIMIZER)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            note(Phase.BETWEEN, step)
            told(rank, step)
            if step % SAVE_EVERY == 0 and (rank == 0 or settings.own_folders):
                note(Phase.CHECKPOINT)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
                note(Phase.BETWEEN)
            if length.reached(step):
                break
    whole = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    say("digest", hashlib.sha256(whole).hexdigest()[:16])
    dist.destroy_process_group()


def told(rank: int, step: int) -> None:
    if rank == 0:
        say("step", step, "by", os.getpid())


def rank_now() -> int:
    """It follows the generation."""
    rank = paceline.get("rank")
    assert isinstance(rank, int)
    return rank


def tell_problem(saved: Any) -> None:
    if saved.problem is not None:
        say("not saved:", saved.problem)


class OwnSamples(list[int]):
    """The indices of a rank's own data, as a sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Always the same order."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("elastic", "restart", "torch"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds that a step takes at least")
    parser.add_argument("--until", type=Path, help="a file that may come to be there: the number of the last step")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a collective of torch's may take")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--transport", default="auto")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="of the data; if given, torch's ranks do not share"
    )
    parser.add_argument("--own-folders", action="store_true", help="every rank sees checkpoints of its own")
    parser.add_argument("--audit-every", type=int, default=0)
    parser.add_argument("--checksums", action="store_true")
    parser.add_argument("--swap", type=int, help="the step in which ranks swap two sums")
    parser.add_argument("--flip-on-wire", type=int, help="the step in which a bit of a message flips")
    parser.add_argument("--clock", type=float, default=0.0, help="seconds by which the wall clock of rank 1 is wrong")
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    if (clock := given.pop("clock")) and os.environ.get("RANK") == "1":
        right = time.time
        time.time = lambda: right() + clock
    length = Length(given.pop("steps"), given.pop("pause"), given.pop("until"))
    settings = Settings(**given)
    say("loaded")  # from now on it is up to who forms the group
    {"torch": torchs, "elastic": elastic, "restart": ours}[settings.way](length, settings)


if __name__ == "__main__":
    main()
