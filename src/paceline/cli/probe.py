"""What `paceline doctor` runs on two ranks: what torch offers here, and how fast the ranks reduce."""

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import paceline
from paceline.collectives import TorchDistTransport, Transport, finish
from paceline.collectives.choose import choose
from paceline.rank_report import report

TIMEOUT_S = 30.0
SMALL, LARGE = 4 << 10, 25 << 20
REPEATS = 9


def main() -> None:
    """Report what is found; anything that fails ends this rank with its traceback."""
    report(
        "torch",
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        gpus=[torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        backends=list(_backends()),
        threads=torch.get_num_threads(),
    )
    on_gpus = torch.cuda.device_count() > 1
    world = paceline.init(timeout=TIMEOUT_S, device=None if on_gpus else "cpu", backend=None if on_gpus else "gloo")
    assert dist.group.WORLD is not None
    base = TorchDistTransport(dist.group.WORLD)
    cpu = torch.device("cpu")
    _measure("gloo", base, cpu)
    _measure("auto", choose(base, "auto", [cpu], TIMEOUT_S), cpu)
    if on_gpus:
        _measure("nccl", base, world.device)
    dist.barrier()
    paceline.shutdown()


def _backends() -> Iterator[str]:
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        available = getattr(dist, f"is_{name}_available", None)
        if available is not None and available():
            yield name


def _measure(name: str, transport: Transport, device: torch.device) -> None:
    seconds, sums = {}, []
    for size in (SMALL, LARGE):
        flat = transport.allocate(size // 4, torch.float32, device)
        taken = []
        for _ in range(REPEATS):
            flat.fill_(transport.rank + 1)
            began = time.perf_counter()
            finish(transport.all_reduce(flat), what="a probe", watch=transport.watch, timeout_s=TIMEOUT_S)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
        seconds[size] = statistics.median(taken[2:])
        sums.append(flat.amin().item() == flat.amax().item() == transport.size * (transport.size + 1) / 2)
    report(
        "reduced",
        over=name,
        transport=type(transport).__name__,
        right=all(sums),
        small_s=seconds[SMALL],
        large_s=seconds[LARGE],
        bytes=LARGE,
        ranks=transport.size,
    )


if __name__ == "__main__":
    main()
