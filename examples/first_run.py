"""A first look at paceline: two ranks train one small network and stay equal.

./scripts/train                                               # installs what is needed and runs this
torchrun --standalone --nproc-per-node 2 examples/first_run.py
"""

import copy
import time

import torch
from torch import nn

import paceline
from paceline.trace import Moment, Stamp

STEPS = 150
BATCH = 64  # over all ranks


def main() -> None:
    world = paceline.init()
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 512), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(512, 10)).to(world.device)
    reference = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(2)
    difference = 0.0
    began = time.perf_counter()
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64, generator=data)
        labels = (inputs @ teacher).argmax(dim=1)
        mine = slice(world.rank, None, world.size)
        loss = nn.functional.cross_entropy(model(inputs[mine].to(world.device)), labels[mine].to(world.device))
        loss.backward()
        if step == 0:
            difference = compare_with_one_process(reference, model, inputs, labels)
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0 or step == STEPS - 1:
            mean_loss = paceline.all_reduce(loss.detach().cpu().clone(), "mean").item()
            if world.rank == 0:
                print(f"step {step:4d}   loss {mean_loss:.3f}", flush=True)
    report(world, model, difference, time.perf_counter() - began)
    paceline.shutdown()


def compare_with_one_process(
    reference: nn.Module, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> float:
    """The largest difference between our gradients and those of one process that saw the whole batch."""
    device = next(reference.parameters()).device
    nn.functional.cross_entropy(reference(inputs.to(device)), labels.to(device)).backward()
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)


def report(world: paceline.World, model: paceline.DistributedDataParallel, difference: float, seconds: float) -> None:
    digest = sum(float(p.detach().double().sum()) for p in model.parameters())
    digests = [float(d) for d in paceline.all_gather(torch.tensor(digest, dtype=torch.float64))]
    if world.rank != 0:
        return
    print(f"\n{world.size} ranks on {world.device}, {STEPS} steps in {seconds:.1f} s")
    print(f"gradients against one process with the whole batch: largest difference {difference:.1e}")
    print(f"replicas after {STEPS} steps: {'equal' if len(set(digests)) == 1 else f'DIFFERENT {digests}'}")
    print(f"buckets: {len(model.layout.buckets)}, reduced while backward still ran: {hidden(model.trace.stamps())}")
    print("\nNext: open examples/first_run.py, and put your own model in the place of `net`.")


def hidden(stamps: list[Stamp]) -> int:
    """How many buckets of the last backward were reduced before it had produced its last gradient."""
    last = max(stamp.backward for stamp in stamps)
    ended = next(s.ns for s in stamps if s.backward == last and s.moment is Moment.BACKWARD_END)
    return sum(s.backward == last and s.moment is Moment.COMPLETED and s.ns < ended for s in stamps)


if __name__ == "__main__":
    main()
