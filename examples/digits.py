"""An image classifier on the digits that come with scikit-learn: 1797 pictures of 8 x 8, no download.

paceline run -n 2 examples/digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS, BATCH = 12, 64  # samples of a step, over all ranks


def main() -> None:
    world = paceline.init()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    everything = TensorDataset(images, torch.tensor(labels))
    train, test = torch.utils.data.random_split(everything, [1500, 297])

    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)),
    )
    model = paceline.DistributedDataParallel(net.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = paceline.Loader(train, BATCH // world.size, seed=0)

    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(world.device)), y.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 4 == 3:
            right = accuracy(model, test, world)
            if world.rank == 0:
                print(f"epoch {epoch + 1}   right on unseen digits: {right:.1%}", flush=True)
    paceline.shutdown()


@torch.no_grad()
def accuracy(
    model: nn.Module, data: torch.utils.data.Dataset[tuple[torch.Tensor, ...]], world: paceline.World
) -> float:
    """Every picture is looked at by exactly one rank: no padding, so the number is the true one."""
    sampler = paceline.DistributedSampler(data, shuffle=False, exactly_once=True)
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    for x, y in DataLoader(data, batch_size=64, sampler=sampler):
        counts += torch.tensor([(model(x.to(world.device)).argmax(1).cpu() == y).sum(), len(y)])
    model.train()
    right, seen = paceline.all_reduce(counts).tolist()
    return float(right / seen)


if __name__ == "__main__":
    main()
