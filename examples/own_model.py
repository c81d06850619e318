"""Your own model, in a short loop. The same file runs under every launcher, and alone.

paceline run -n 2 examples/own_model.py
torchrun --standalone --nproc-per-node 2 examples/own_model.py
python examples/own_model.py
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

EPOCHS, BATCH = 4, 64  # samples of a step, over all ranks


def main(folder: Path) -> None:
    world = paceline.init()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])

    net = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)).to(world.device)  # <- yours
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = paceline.Loader(data, BATCH // world.size, seed=0)
    checkpoints = paceline.Checkpointer(folder, every_steps=50)

    step = 0
    if checkpoints.latest():
        step = checkpoints.load(model=model, optimizer=optimizer, loader=loader).step
        if world.rank == 0:
            print(f"goes on after step {step} of {folder}; delete it to start anew", flush=True)
    while loader.epoch < EPOCHS:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(world.device)), y.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if checkpoints.due(step):
                checkpoints.save(step, model=model, optimizer=optimizer, loader=loader)
        mean = paceline.all_reduce(loss.detach().cpu(), "mean")
        if world.rank == 0:
            print(f"epoch {loader.epoch}   step {step}   loss {mean:.4f}", flush=True)
    checkpoints.wait()
    paceline.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_model"))
