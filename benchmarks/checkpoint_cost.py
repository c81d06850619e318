"""What a checkpoint costs: loading beside torch.load of the same bytes, memory above what a rank holds, and how long a
save blocks training.

python benchmarks/checkpoint_cost.py --mib 512
paceline run -n 2 benchmarks/checkpoint_cost.py --mib 512 --placement zero1
"""

import argparse
import ctypes
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.bench.results import Circumstances, dump_json
from paceline.checkpoint import Checkpointer

MIB = 1 << 20
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Settings:
    """What is measured: a model with Adam's state, so many MiB in all."""

    mib: int
    placement: str
    rounds: int
    compare: bool


def private_bytes() -> int:
    """The memory of this process that it shares with nobody, and with no file."""
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    return sizes["Private_Dirty"] + sizes["Private_Clean"]


def peak_above(call: Callable[[], object]) -> float:
    """How much private memory a call needs for a time, in MiB."""
    before = private_bytes()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return (peak - before) / MIB


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes when all ranks make it at the same time: the slowest of them."""
    paceline.barrier()
    started = time.perf_counter()
    call()
    own = torch.tensor([time.perf_counter() - started])
    return float(paceline.all_reduce(own, "max"))


class Run:
    """A model and its optimizer, with state, and the directories of this measurement."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        width = 1024
        count = max(1, settings.mib * MIB // (12 * width * width))
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
        model = paceline.DistributedDataParallel(self.net, placement=settings.placement)
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.model, self.optimizer = model, optimizer
        self.checkpointer = Checkpointer(folder / "ours", compare=settings.compare)
        self.file = folder / f"torch-{dist.get_rank() if dist.is_initialized() else 0}.pt"

    def held(self) -> list[torch.Tensor]:
        """The tensors that this rank has of the state."""
        states = self.optimizer.state.values()
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [*params, *(value for state in states for value in state.values())]

    def save(self, step: int) -> float:
        """How long a save blocks, in seconds, all of its writing done afterwards."""
        paceline.barrier()
        blocked = torch.tensor([self.checkpointer.save(step, model=self.model, optimizer=self.optimizer).blocked_s])
        self.checkpointer.wait()
        return float(paceline.all_reduce(blocked, "max"))

    def load(self) -> None:
        self.checkpointer.load(model=self.model, optimizer=self.optimizer)

    def save_for_torch(self) -> int:
        """The same bytes in one file of torch's."""
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.file)
        return self.file.stat().st_size


@dataclass(frozen=True)
class Found:
    """What was measured on rank 0."""

    ranks: int
    mib: float
    load_average: float
    load_s: list[float]
    torch_load_s: list[float]
    save_blocks_s: list[float]
    copy_s: list[float]
    peak_above_mib: float  # private memory, on the rank where it was highest


def measure(settings: Settings, folder: Path) -> Found:
    """Load, save and copy in turns. All ranks call it."""
    run = Run(settings, folder)
    size = run.save_for_torch()
    run.save(1)
    copies = [torch.empty_like(one) for one in run.held()]

    def copy_out() -> None:
        for copy, one in zip(copies, run.held(), strict=True):  # into memory that is there
            copy.copy_(one.detach())

    copy_out()
    ours, theirs, blocked, copied = [], [], [], []
    for number in range(settings.rounds):
        ours.append(seconds(run.load))
        theirs.append(seconds(lambda: torch.load(run.file)))
        blocked.append(run.save(2 + number))
        copied.append(seconds(copy_out))
    copies.clear()
    above = torch.tensor([peak_above(run.load)])
    return Found(
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        mib=size / MIB,
        load_average=os.getloadavg()[0],
        load_s=ours,
        torch_load_s=theirs,
        save_blocks_s=blocked,
        copy_s=copied,
        peak_above_mib=float(paceline.all_reduce(above, "max")),
    )


def rows(settings: Settings, found: Found) -> list[str]:
    """The report."""
    ratio = median(one / other for one, other in zip(found.load_s, found.torch_load_s, strict=True))
    what, rounds = f"{settings.placement} on {found.ranks} ranks", settings.rounds
    load, torch_load = median(found.load_s) * 1e3, median(found.torch_load_s) * 1e3
    blocks, copies = median(found.save_blocks_s) * 1e3, median(found.copy_s) * 1e3
    return [
        f"{what}, {found.mib:.0f} MiB, {rounds} rounds, load average {found.load_average:.1f}",
        f"load {load:.0f} ms, torch.load {torch_load:.0f} ms: {ratio:.2f} ×",
        f"peak private memory above what a rank holds: {found.peak_above_mib:.0f} MiB",
        f"a save blocks {blocks:.1f} ms; a copy of all a rank holds {copies:.1f} ms",
    ]


def allocate_as_in_a_new_process() -> None:
    """Whoever resumes loads once, into memory that the process has not had before. Without this the C library would
    keep what one torch.load has freed for the next one, which then has no pages to get."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)


def main() -> None:
    allocate_as_in_a_new_process()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="bytes of parameters and Adam's state")
    parser.add_argument("--placement", default="ddp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write all samples here")
    arguments = vars(parser.parse_args())
    file = arguments.pop("json")
    settings = Settings(**arguments)
    world = paceline.init()
    folder = [tempfile.mkdtemp(dir=".")] if world.rank == 0 else [""]
    if world.size > 1:
        dist.broadcast_object_list(folder)
    try:
        found = measure(settings, Path(folder[0]))
    finally:
        paceline.barrier()
        if world.rank == 0:
            shutil.rmtree(folder[0])
    if world.rank == 0:
        sys.stdout.write("\n".join(rows(settings, found)) + "\n")
        if file:
            about = {"circumstances": asdict(Circumstances.now()), "settings": asdict(settings)}
            file.write_text(dump_json({**about, **asdict(found)}))
    paceline.shutdown()


if __name__ == "__main__":
    main()
