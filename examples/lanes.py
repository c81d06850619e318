"""The same bits on any number of ranks: this prints one digest for -n 1, 2, 3 … 8.

paceline run -n 3 examples/lanes.py
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

LANES, MICRO, EPOCHS = 8, 8, 2  # a step takes 8 x 8 samples, however many ranks there are


def main() -> None:
    torch.set_num_threads(1)  # the same on every rank in every world: kernels add in an order that depends on it
    world = paceline.init()
    if world.device.type == "cuda":  # and set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])

    net = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1)).to(world.device)
    model = paceline.DistributedDataParallel(net, lanes=LANES, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: paceline.Loader[Any] = paceline.Loader(data, MICRO, lanes=LANES, seed=7)

    step = 0
    while loader.epoch < EPOCHS:
        for microbatches in loader:  # those of this rank's lanes
            for x, y in model.lanes(microbatches, step):
                nn.functional.mse_loss(model(x.to(world.device)), y.to(world.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    digest = paceline.digest(net, optimizer, step, loader)
    if world.rank == 0:
        print(f"{world.size} rank(s)   step {step}   digest {digest}", flush=True)
    paceline.shutdown()


if __name__ == "__main__":
    main()
