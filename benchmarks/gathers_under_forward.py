"""What it saves that updated parameters come under the next forward, under "zero1" and "zero2".

    python benchmarks/gathers_under_forward.py --json benchmarks/<date>-<hardware>-gathers.json
    sudo .venv/bin/python benchmarks/gathers_under_forward.py --link-mbit 1000     # over a slow link
    python benchmarks/gathers_under_forward.py --device cuda --model gpt2 --micro-batch 16

Both ways are run in turn by the same ranks. Parameters are gathered inside `optimizer.step()` where something else
looks at their memory, so the first way keeps a view of each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rank_processes import join, run_ranks

WARMUP = 6
BURST = 4  # steps that are timed together
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Settings:
    """What is trained, and on what."""

    device: str
    model: str
    micro_batch: int
    steps: int
    ranks: int
    link_mbit: int


class Way:
    """One way to train the model."""

    def __init__(self, settings: Settings, device: Any, placement: str, *, inside: bool) -> None:
        import torch

        import paceline
        from paceline.bench.gpt import build_model
        from paceline.bench.spec import StepSpec

        spec = StepSpec(model=settings.model, micro_batch=settings.micro_batch, ranks=settings.ranks)
        net = build_model(spec, device)
        transport = "torch" if settings.device == "cpu" else "auto"
        self.model = paceline.DistributedDataParallel(net, placement=placement, transport=transport)
        self.optimizer = self.model.optimizer(torch.optim.AdamW, lr=1e-5, fused=True)
        self.views = [param.detach() for param in net.parameters()] if inside else []
        self.device = device
        self.samples: list[list[float]] = []

    def step(self, x: Any, y: Any) -> None:
        """One step. What a step has left under way belongs to the next one, so steps of one way follow each other."""
        marks = [time.perf_counter()]  # of the host, which runs ahead of a device: there only whole bursts tell
        loss = self.model(x, y)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        self.samples.append([after - before for before, after in pairwise(marks)])


def run_rank(rank: int, size: int, store: str, given: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from paceline.bench.gpt import rank_batches
    from paceline.bench.spec import StepSpec

    settings = Settings(**given)
    device = join(rank, size, store, settings.device)
    spec = StepSpec(model=settings.model, micro_batch=settings.micro_batch, ranks=size)
    ((x, y),) = rank_batches(spec, device, rank, 0)
    ways = {
        "ddp": Way(settings, device, "ddp", inside=False),
        "zero1 inside step()": Way(settings, device, "zero1", inside=True),
        "zero1 under forward": Way(settings, device, "zero1", inside=False),
    }
    totals: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(settings.steps):
        for name, way in ways.items():
            for _ in range(WARMUP if turn == 0 else 1):  # the first step of a turn pays for what others left behind
                way.step(x, y)
            dist.barrier()
            synchronize(device)
            way.samples.clear() if turn == 0 else None
            began = time.perf_counter()
            for _ in range(BURST):
                way.step(x, y)
            synchronize(device)
            totals[name].append((time.perf_counter() - began) / BURST)
    same = all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(
            ways["ddp"].model.parameters(), ways["zero1 under forward"].model.parameters(), strict=True
        )
    )
    if rank == 0:
        found = {
            name: {
                "step_ms": 1e3 * median(totals[name]),
                "phases_ms": dict(
                    zip(PHASES, (1e3 * median(phase) for phase in zip(*way.samples, strict=True)), strict=True)
                ),
                "samples_s": totals[name],
            }
            for name, way in ways.items()
        }
        sys.stdout.write(json.dumps({"ways": found, "bits of ddp": same}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def in_namespace(mbit: int) -> int:
    """Run this again where loopback is a link of so many Mbit/s."""
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 512kb latency 200ms"
    again = [
        "unshare",
        "--net",
        "sh",
        "-c",
        f'ip link set lo up && {limit} && exec "$@"',
        "sh",
        sys.executable,
        *sys.argv,
    ]
    return subprocess.run(again, env=os.environ | {"PACELINE_SLOW_LINK": "1"}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help=f"turns of each way, of {BURST} steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link-mbit", type=int, default=0, help="as root: loopback at so many Mbit/s; 0: as it is")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(*json.loads(given.rank))
        return 0
    if given.link_mbit and "PACELINE_SLOW_LINK" not in os.environ:
        return in_namespace(given.link_mbit)
    settings = Settings(given.device, given.model, given.micro_batch, given.steps, given.ranks, given.link_mbit)
    (found,) = run_ranks(__file__, settings.ranks, asdict(settings))
    for name, way in found["ways"].items():
        phases = ", ".join(f"{phase} {value:.1f}" for phase, value in way["phases_ms"].items())
        ratio = way["step_ms"] / found["ways"]["ddp"]["step_ms"]
        sys.stdout.write(f"{name:22} {way['step_ms']:8.1f} ms  {ratio:.2f} of ddp  ({phases})\n")
    sys.stdout.write(f"bits of ddp: {found['bits of ddp']}\n")
    if given.json is not None:
        import torch

        from paceline.bench.results import dump_json

        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
        about |= {"versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
        given.json.write_text(dump_json({**about, **asdict(settings), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
