"""Two hosts joined by 1 Gbit/s: network namespaces of this machine. Needs root, iproute2, and nothing else running.

    sudo .venv/bin/python benchmarks/two_hosts.py --per-host 1 --json benchmarks/<date>-<hardware>-two-hosts.json

The bound is forward + max(backward, bytes / link) + optimizer, with the phases of the step without synchronisation.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

ADDRESSES = ("10.201.78.1", "10.201.78.2")
PORT = 29500
LINK_BYTES_PER_S = 125e6
WARMUP = 6


def sh(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20)


def conduct(per_host: int, steps: int, json_file: Path | None) -> None:
    mark = secrets.token_hex(3)
    hosts = [(f"paceline-{mark}-{side}", f"pl{mark}{side}") for side in "ab"]
    with ExitStack() as undo:
        for namespace, _ in hosts:
            sh("ip", "netns", "add", namespace)
            undo.callback(sh, "ip", "netns", "del", namespace)
        sh("ip", "link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        for (namespace, interface), address in zip(hosts, ADDRESSES, strict=True):
            sh("ip", "link", "set", interface, "netns", namespace)
            sh("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            for name in ("lo", interface):
                sh("ip", "-n", namespace, "link", "set", name, "up")
            limit = ("tbf", "rate", "1gbit", "burst", "512kb", "latency", "100ms")
            sh("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit)
        workers = []
        for rank in range(2 * per_host):
            namespace, interface = hosts[rank // per_host]
            command = [sys.executable, __file__, "--rank", str(rank), "--per-host", str(per_host)]
            workers.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *command, "--steps", str(steps)],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": interface},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        told, _ = workers[0].communicate(timeout=600)
        for worker in workers:
            worker.wait(60)
    from paceline.bench.results import dump_json

    text = dump_json(json.loads(told.splitlines()[-1]))
    sys.stdout.write(text)
    if json_file is not None:
        json_file.write_text(text)


def work(rank: int, size: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    from paceline.bench.gpt import build_model, rank_batches
    from paceline.bench.spec import StepSpec

    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESSES[0], PORT, size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    spec, cpu = StepSpec(model="gpt-5m", ranks=size), torch.device("cpu")
    contenders = {}
    for name in ("floor", "paceline", "torch"):
        contenders[name] = wrap(name, build_model(spec, cpu))
    ((x, y),) = rank_batches(spec, cpu, rank, 0)
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for step in range(WARMUP + steps):
        for name, (model, optimizer) in contenders.items():
            dist.barrier()
            marks = [time.perf_counter()]
            loss = model(x, y)
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
            if step >= WARMUP:
                samples[name].append([b - a for a, b in pairwise(marks)])
    if rank == 0:
        model = contenders["paceline"][0]
        sys.stdout.write(json.dumps(summary(samples, model, size, steps)) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def wrap(name: str, net: Any) -> tuple[Any, Any]:
    import torch

    import paceline

    if name == "paceline":
        net = paceline.DistributedDataParallel(net)
    elif name == "torch":
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def summary(samples: dict[str, list[list[float]]], model: Any, size: int, steps: int) -> dict[str, Any]:
    import torch

    forward, backward, optimizer = (statistics.median(s[phase] for s in samples["floor"]) for phase in range(3))
    nbytes = sum(param.numel() * param.element_size() for param in model.parameters())
    bound = forward + max(backward, nbytes / LINK_BYTES_PER_S) + optimizer
    medians = {name: statistics.median(map(sum, found)) for name, found in samples.items()}
    return {
        "what": f"GPT 5.3 M, micro-batch 1, {size} ranks on 2 hosts joined by 1 Gbit/s (tc tbf), {steps} steps",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "cores": os.cpu_count(),
        "transport": type(model._transport).__name__,
        "plan": None if model.bucket_plan is None else model.bucket_plan.describe(),
        "median_ms": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "floor_phases_ms": [round(1e3 * value, 2) for value in (forward, backward, optimizer)],
        "bytes": nbytes,
        "bound_ms": round(1e3 * bound, 2),
        "paceline_to_bound": round(medians["paceline"] / bound, 3),
        "paceline_to_torch": round(medians["paceline"] / medians["torch"], 3),
        "samples_s": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each of the two hosts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help="used by the ranks that this starts")
    options = parser.parse_args()
    if options.rank is None:
        conduct(options.per_host, options.steps, options.json)
    else:
        work(options.rank, 2 * options.per_host, options.steps)


if __name__ == "__main__":
    main()
