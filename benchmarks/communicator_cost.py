"""What the communicator of a replica costs on a device: seconds until it works, and bytes of the device's memory.

    python benchmarks/communicator_cost.py --json benchmarks/<date>-<hardware>-communicator.json

Ranks share a device and talk over sockets. Each replica has a duplicate of the default group, split off its
communicator where NCCL can; the first collective of a communicator takes most of its memory.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rank_processes import join, run_ranks


def run_rank(rank: int, size: int, store: str, replicas: int) -> None:
    import torch
    import torch.distributed as dist

    import paceline

    device = join(rank, size, store, "cuda")
    torch.ones(1, device=device).sum().item()  # the context of this process

    def used() -> int:
        """By all processes on the device, when none of them does anything."""
        torch.cuda.synchronize()
        meet()
        free, total = torch.cuda.mem_get_info()
        meet()
        return total - free

    def meet() -> None:
        dist.barrier(group=on_host)

    on_host = dist.new_group(backend="gloo")
    before, began = used(), time.perf_counter()
    dist.all_reduce(torch.ones(1 << 20, device=device))
    torch.cuda.synchronize()
    seconds = [time.perf_counter() - began]
    nbytes = [(used() - before) // size]
    kept = []
    for _ in range(replicas):
        net = torch.nn.Linear(1024, 1024).cuda()
        x = torch.ones(8, 1024, device=device)
        net(x).sum().backward()
        torch.cuda.empty_cache()
        before, began = used(), time.perf_counter()
        replica = paceline.DistributedDataParallel(net)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        replica(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        nbytes.append((used() - before) // size)
        kept.append(replica)
    if rank == 0:
        sys.stdout.write(json.dumps({"seconds": seconds, "bytes": nbytes}) + "\n")
        sys.stdout.flush()
    meet()
    paceline.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(*json.loads(given.rank))
        return
    (found,) = run_ranks(__file__, given.ranks, given.replicas)
    own = {name: values[1:] for name, values in found.items()}
    sys.stdout.write(
        f"the group of {given.ranks} ranks: {found['seconds'][0]:.3f} s, {found['bytes'][0] / 2**20:.0f} MiB a rank\n"
        f"a replica's: {median(own['seconds']):.3f} s, {median(own['bytes']) / 2**20:.0f} MiB a rank\n"
    )
    if given.json is not None:
        from paceline.bench.results import Circumstances, dump_json

        about = asdict(Circumstances.now(gpu=_device_name()))
        rows = {"default group": {name: values[0] for name, values in found.items()}, "replicas": own}
        given.json.write_text(dump_json({"circumstances": about, "ranks": given.ranks, **rows}))


def _device_name() -> str:
    import torch

    name: Any = torch.cuda.get_device_name()
    return str(name)


if __name__ == "__main__":
    main()
