"""A model that does not fit as ddp: the plan refuses it, and zero3 trains it from the meta device.

    python benchmarks/too_large_for_ddp.py --device cuda --json benchmarks/<date>-h200-too-large.json

With 5.5 billion parameters on a GPU; without arguments a small one, on the CPU.
Two ranks share one device, each with half of its memory. `--built` builds the model on the device before it is wrapped.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rank_processes import join, run_ranks

RANKS = 2
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"shape": (32768, 4096, 26, 32, 512), "batch": 2},
    "cpu": {"shape": (8192, 768, 7, 8, 64), "batch": 2, "memory": 1400 * 2**20},
}


def run_rank(rank: int, size: int, store: str, settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import paceline
    from paceline.bench.gpt import BenchGPT
    from paceline.bench.spec import GPTShape
    from paceline.memory_plan.measured import Peak
    from paceline.memory_plan.numbers import PlanError

    device = join(rank, size, store, settings["device"])
    shape, batch = GPTShape(*settings["shape"]), settings["batch"]
    train(BenchGPT(GPTShape(64, 64, 2, 2, 16)).to(device, torch.bfloat16), 64, 16, batch, device, 2)  # loads libraries
    with torch.device("meta"):
        net = BenchGPT(shape).to(torch.bfloat16)
    share = settings.get("memory") or torch.cuda.get_device_properties(device).total_memory // size
    tokens = torch.zeros(batch, shape.context, dtype=torch.long)
    how = {"ranks": size, "master": "float32", "fused": True, "device": device.type, "meta": not settings["built"]}
    as_ddp, as_zero3 = (
        paceline.plan(net, (tokens, tokens), placement=name, device_memory=share, **how) for name in ("ddp", "zero3")
    )
    try:
        as_ddp.check_fits()
    except PlanError as error:
        refused = str(error)
    else:
        raise SystemExit(f"the plan takes this model as ddp: {as_ddp}")
    as_zero3.check_fits()
    peak = Peak(device)
    if settings["built"]:
        with torch.device(device):
            net = BenchGPT(shape).to(torch.bfloat16)
    losses, seconds = train(net, shape.vocabulary, shape.context, batch, device, settings["steps"])
    measured = torch.tensor(peak.nbytes())
    dist.all_reduce(measured, dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            "parameters": as_zero3.parameters,
            "share_bytes": share,
            "refused": refused,
            "verdict": str(as_zero3).splitlines()[0],
            "planned_as_ddp_bytes": as_ddp.total,
            "planned_bytes": as_zero3.total,
            "measured_bytes": int(measured),
            "losses": losses,
            "step_seconds": seconds,
            "against": as_zero3.against(int(measured)),
        }
        say(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(net: Any, vocabulary: int, context: int, batch: int, device: Any, steps: int) -> tuple[list[float], float]:
    """Losses of some steps on one batch, and the seconds of the last one."""
    import torch

    import paceline

    model = paceline.DistributedDataParallel(net, placement="zero3")
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, fused=True, master=torch.float32)
    text = torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(device)
    losses, began = [], 0.0
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - began


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--built", action="store_true", help="build the model on the device, not on the meta device")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(*json.loads(given.rank))
        return 0
    settings = {"device": given.device, "steps": given.steps, "built": given.built, **SIZES[given.device]}
    (found,) = run_ranks(__file__, RANKS, settings)
    say(f"as ddp: {found['refused']}\nas zero3: {found['verdict']}\n\n{found.pop('against')}\n")
    losses = ", ".join(f"{loss:.3f}" for loss in found["losses"])
    say(f"losses {losses}; {found['step_seconds']:.2f} s for the last step")
    if given.json is not None:
        from paceline.bench.results import Circumstances, dump_json

        given.json.write_text(dump_json({"circumstances": Circumstances.now(None).__dict__, **settings, **found}))
    off = found["planned_bytes"] / found["measured_bytes"] - 1
    return 0 if abs(off) <= 0.10 and found["losses"][-1] < found["losses"][0] else 1


if __name__ == "__main__":
    sys.exit(main())
