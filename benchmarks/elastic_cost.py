"""What `Elastic` costs when nothing fails: the same loop with and without it, in turns, in one elastic job.

    paceline run --ranks 2:2 benchmarks/elastic_cost.py --size tiny --rounds 30 --steps 10

Both train a model of their own, equal in every way. Rank 0 prints a line of JSON: the medians of a step, and the median
of the ratios of rounds that followed each other.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

import paceline
from paceline.train.model import GPT
from paceline.train.sizes import SIZES


class Part:
    """A model, and what trains it."""

    def __init__(self, size: str, batch: int, lanes: int | None, device: torch.device) -> None:
        torch.manual_seed(0)
        shape = SIZES[size]
        self.model = paceline.DistributedDataParallel(GPT(shape, 256).to(device), lanes=lanes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        texts = torch.randint(256, (4096, shape.context + 1), generator=torch.Generator().manual_seed(1))
        self.loader: paceline.Loader[Any] = paceline.Loader(list(texts), batch, lanes=lanes, reseed=False)
        self.batches: Iterator[Any] = self.loader.endless()
        self.device = device

    def backward(self, step: int) -> None:
        found = next(self.batches)
        lanes = self.model._lane_count is not None
        for tokens in self.model.lanes(found, step) if lanes else [found]:
            on_device = tokens.to(self.device)
            self.model(on_device[:, :-1], on_device[:, 1:]).backward()


def timed(step: Callable[[int], None], begin: int, steps: int, device: torch.device) -> float:
    """Seconds for each of so many steps."""
    paceline.barrier()
    started = time.perf_counter()
    for number in range(begin, begin + steps):
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES))
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank, or of each lane")
    parser.add_argument("--lanes", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=30, help="of each loop")
    parser.add_argument("--steps", type=int, default=10, help="of each round")
    asked = parser.parse_args()
    world = paceline.init()
    elastic = Part(asked.size, asked.batch, asked.lanes, world.device)
    run = paceline.Elastic(model=elastic.model, optimizer=elastic.optimizer, loader=elastic.loader)
    plain = Part(asked.size, asked.batch, asked.lanes, world.device)

    def step_with(_: int) -> None:
        with run.attempt():
            elastic.backward(run.step)
            with run.commit():
                elastic.optimizer.step()
            elastic.optimizer.zero_grad()

    def step_without(number: int) -> None:
        plain.backward(number)
        plain.optimizer.step()
        plain.loader.commit()
        plain.optimizer.zero_grad()

    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(asked.rounds + 2):  # the first two warm up: buckets are planned then
        loops = [("with", step_with), ("without", step_without)]
        for name, step in loops if number % 2 else reversed(loops):
            seconds[name].append(timed(step, number * asked.steps, asked.steps, world.device))
    kept = {name: found[2:] for name, found in seconds.items()}
    ratios = [with_it / without for with_it, without in zip(kept["with"], kept["without"], strict=True)]
    if world.rank == 0:
        medians = {f"{name}_ms": round(1e3 * median(found), 3) for name, found in kept.items()}
        found = {"ranks": world.size, **vars(asked), **medians, "ratio": round(median(ratios), 4)}
        sys.stdout.write(json.dumps(found) + "\n")
    run.finish()
    paceline.shutdown()


if __name__ == "__main__":
    main()
