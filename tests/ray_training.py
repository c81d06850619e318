"""A script that trains until a file says at which step it shall stop, and prints what it has come to.

ray_training.py STOP [STEPS]    with STEPS it prints the digest of every step until then, as the steps
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline

torch.set_num_threads(1)
LANES = 4


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def main(stop: Path, steps: int) -> None:
    paceline.init()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    model = paceline.DistributedDataParallel(net, lanes=LANES, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader: Any = paceline.Loader(Samples(), 2, lanes=LANES, seed=3)
    run = paceline.Elastic(model=model, optimizer=optimizer, loader=loader)
    batches = loader.endless()
    while run.step < (steps or last_step(stop)):
        with run.attempt():
            for microbatch in model.lanes(next(batches), run.step):
                model(microbatch).square().mean().backward()
            with run.commit():
                optimizer.step()
            optimizer.zero_grad()
            if paceline.get("rank") == 0:
                say(f"step {run.step} of {paceline.get('ws')}")
            time.sleep(0.0 if steps else 0.05)
    run.finish()
    say(f"end {run.step} {paceline.digest(model, optimizer, run.step, loader)}")
    paceline.shutdown()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def last_step(stop: Path) -> int:
    """Named well before it comes, so all ranks know."""
    return int(stop.read_text()) if stop.exists() else 1 << 30


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
