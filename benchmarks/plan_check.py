"""The memory plan beside what training really takes: GPTs of several sizes, batches and placements, on real ranks.

    python benchmarks/plan_check.py --device cpu --json benchmarks/<date>-<hardware>-plan.json
    python benchmarks/plan_check.py --device cuda --dtype bf16-master --json ...     # two NCCL ranks may share one GPU
    python benchmarks/plan_check.py --transport torch     # over gloo
    python benchmarks/plan_check.py --held        # bytes per parameter when backward has ended, by placement

On the CPU every case has fresh processes: each trains a tiny model first, notes its memory, builds the model, wraps it,
trains, and tells the highest point from building to the end: growth of the resident set, or `max_memory_allocated` on a
GPU. The plan is made from the model's shapes alone; the closed form from its numbers. What is compared is the rank that
took the most.
"""

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rank_processes import join, run_ranks

STEPS = {"cpu": 4, "cuda": 3}  # on the CPU buckets are planned after the third, and made anew
PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")
# What torch's optimizer is told for each of `paceline plan --update`.
UPDATES: dict[str, dict[str, bool | None]] = {
    "auto": {"foreach": None, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
    "loop": {"foreach": False, "fused": False},
}


@dataclass(frozen=True)
class Case:
    """One model, one batch, one placement."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    placement: str = "ddp"
    device: str = "cpu"
    dtype: str = "float32"
    update: str = "auto"
    transport: str = "auto"


SHAPES = {
    "cpu": {
        "wide-60m": (8192, 1024, 3, 8, 64),
        "63m": (8192, 768, 7, 8, 64),
        "deep-65m": (4096, 512, 19, 8, 64),
        "bytes-85m": (256, 768, 12, 12, 64),
        "vocabulary-92m": (50304, 768, 2, 12, 64),
        "110m": (16384, 1024, 6, 16, 64),
    },
    "cuda": {
        "34m": (8192, 512, 8, 8, 1024),
        "bytes-85m": (256, 768, 12, 12, 1024),
        "gpt2": (50304, 768, 12, 12, 1024),
        "deep-190m": (8192, 768, 25, 12, 512),
        "gpt2-medium": (50304, 1024, 24, 16, 1024),
        "wide-500m": (32768, 2048, 8, 16, 512),
    },
}
# What the plan counts beside the bytes of parameters, gradients and states that a rank holds between two steps.
BESIDE = ("gradient buckets", "staging in shared memory", "kept for gathers", "math libraries")
HELD = {"cpu": {"155m": (8192, 1024, 11, 16, 64)}, "cuda": {"gpt2-medium": SHAPES["cuda"]["gpt2-medium"]}}
BATCHES = {"cpu": (1, 4, 12), "cuda": (2, 6, 16)}


def cases(given: argparse.Namespace) -> list[Case]:
    shapes = (HELD if given.held else SHAPES)[given.device]
    chosen = given.only.split(",") if given.only else list(shapes)
    batches = [int(part) for part in given.batches.split(",")] if given.batches else BATCHES[given.device]
    how = {"device": given.device, "dtype": given.dtype, "update": given.update, "transport": given.transport}
    return [
        Case(name, *shapes[name], batch, placement, **how)
        for placement in given.placements.split(",")
        for name in chosen
        for batch in batches
    ]


# ---- in the ranks


def run_rank(rank: int, size: int, store: str, settings: list[dict[str, Any]]) -> None:
    """Measure cases one after another. Those that differ in the batch alone train one model."""
    import torch
    import torch.distributed as dist

    own = [Case(**item) for item in settings]
    join(rank, size, store, own[0].device)
    warm = replace(own[0], vocabulary=64, width=64, layers=2, heads=2, context=16, batch=2)
    for _ in measure([warm]):
        pass
    for _, together in groupby(own, lambda case: replace(case, batch=0)):
        for case, found in measure(list(together)):
            told = torch.tensor([found["measured_bytes"], found["held_bytes"], found["steps_bytes"]])
            dist.all_reduce(told, dist.ReduceOp.MAX)
            if rank == 0:
                keys = ("measured_bytes", "held_bytes", "steps_bytes")
                most = dict(zip(keys, told.tolist(), strict=True))
                say(json.dumps({**asdict(case), "ranks": size, **found, **most}))
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(together: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Build and wrap a model, then train it with each batch."""
    import torch

    import paceline
    from paceline.bench.gpt import BenchGPT
    from paceline.memory_plan.measured import Peak

    case = together[0]
    peak = Peak(case.device)
    before = peak.nbytes() if case.device == "cuda" else 0  # workspaces, which the plan counts for every model
    torch.manual_seed(0)
    kind = torch.float32 if case.dtype in ("float32", "bf16") else torch.bfloat16
    with torch.device(case.device):
        net = BenchGPT(shape_of(case)).to(kind)
    peak.restart()
    model = paceline.DistributedDataParallel(net, placement=case.placement, transport=case.transport)
    ways: dict[str, Any] = UPDATES[case.update]
    master = torch.float32 if case.dtype == "bf16-master" else None
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, master=master, **ways)
    wrapping = peak.nbytes()
    for case in together:
        text = torch.randint(case.vocabulary, (case.batch, case.context + 1), device=case.device)
        x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        peaks: list[int] = []
        held = 0
        for step in range(STEPS[case.device]):
            peak.restart()
            with torch.autocast(case.device, dtype=torch.bfloat16, enabled=case.dtype == "bf16"):
                loss = model(x, y)
            loss.backward()
            del loss
            if step == STEPS[case.device] - 1:
                peaks.append(peak.nbytes())
                held = held_now(peak)
                peak.restart()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(peak.nbytes())
        steps = max(peaks[1:])  # the optimizer makes its states at the end of the first one
        yield (
            case,
            {
                "measured_bytes": max(wrapping, steps),
                "wrapping_bytes": wrapping,
                "steps_bytes": steps,
                "measured_by_step": peaks,
                "held_bytes": held,
                "before_bytes": before,
            },
        )


def held_now(peak: Any) -> int:
    """What is held at this moment, without what the C library keeps of memory that was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    peak.restart()
    return int(peak.nbytes())


def shape_of(case: Case) -> Any:
    from paceline.bench.spec import GPTShape

    return GPTShape(case.vocabulary, case.width, case.layers, case.heads, case.context)


def planned(case: Case, ranks: int) -> dict[str, Any]:
    """The plan of the same model, and that of its numbers."""
    import torch

    from paceline.bench.gpt import BenchGPT
    from paceline.memory_plan.closed_form import PlanSettings
    from paceline.memory_plan.of_model import plan

    ways: dict[str, Any] = UPDATES[case.update]
    with torch.device("meta"):
        skeleton = BenchGPT(shape_of(case))
    tokens = torch.zeros(case.batch, case.context, dtype=torch.long)
    shared: dict[str, Any] = {
        "dtype": case.dtype,
        "ranks": (ranks,),
        "placement": case.placement,
        "device": case.device,
        "transport": case.transport,
    }
    found = plan(skeleton, (tokens, tokens), **ways, **shared)
    closed = PlanSettings(
        params=found.parameters,
        batch=case.batch,
        seq=case.context,
        vocab=case.vocabulary,
        layers=case.layers,
        width=case.width,
        heads=case.heads,
        untied=True,
        update=case.update,
        **shared,
    ).plan()
    peak = found.by_ranks[0].peak
    moments = {moment.name: moment for moment in found.by_ranks[0].moments}
    at_update = {line.name: line.nbytes for line in moments["optimizer step"].lines}
    return {
        "kept": found.convention.split(" = ")[1].split(" bytes")[0],
        "kept_bytes": sum(at_update.get(name, 0) for name in ("parameters", "gradients", "master", "m", "v")),
        "lines_at_update": at_update,
        "parameters": found.parameters,
        "planned_bytes": found.total,
        "peak_moment": peak.name,
        "closed_form_bytes": closed.total,
        "lines": {line.name: line.nbytes for line in peak.lines},
        "moments": {name: moment.total for name, moment in moments.items()},
    }


# ---- the conductor


def conduct(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every case beside its plan. One that fails has an error."""
    names = f"{'model':<16}{'placement':<11}"
    say(
        names
        if given.held
        else f"{names}{'batch':>5}{'measured':>11}{'plan':>11}{'off':>8}{'closed form':>13}{'off':>8}"
    )
    asked = cases(given)
    # On a GPU, where freed memory leaves no holes, one set of processes is enough.
    jobs = [asked] if given.device == "cuda" else [[case] for case in asked]
    for job in jobs:
        rows = run_ranks(__file__, given.ranks, [asdict(case) for case in job])
        try:
            for case, found in zip(job, rows, strict=True):
                found |= planned(case, given.ranks)  # while the ranks of a GPU go on
                show_held(found) if given.held else show(found)
                yield found
        except RuntimeError as error:
            say(f"{job[0].name} as {job[0].placement}, batch {job[0].batch}: {str(error).strip().splitlines()[-1]}")
            yield {**asdict(job[0]), "error": str(error)}


def show(found: dict[str, Any]) -> None:
    off, closed_off = (found[key] / found["measured_bytes"] - 1 for key in ("planned_bytes", "closed_form_bytes"))
    say(
        f"{found['name']:<16}{found['placement']:<11}{found['batch']:>5}{mib(found['measured_bytes']):>11}"
        f"{mib(found['planned_bytes']):>11}{off:>+8.1%}{mib(found['closed_form_bytes']):>13}{closed_off:>+8.1%}"
    )


def show_held(found: dict[str, Any]) -> None:
    """Bytes per parameter when backward has ended, beside what a placement should take, and the peak."""
    count, ranks = found["parameters"], found["ranks"]
    expected, words = found["kept_bytes"] / count, found["kept"]
    beside = {name: found["lines_at_update"].get(name, 0) / count for name in BESIDE}
    buckets, rest = beside.pop("gradient buckets"), sum(beside.values())
    held = (found["held_bytes"] - found["before_bytes"]) / count
    more = "".join(f" + {size:.2f}" for size in (buckets, rest) if size)
    words += ", buckets" * bool(buckets) + "".join(f", {name}" for name, size in beside.items() if size)
    say(
        f"{found['name']:<16}{found['placement']:<11}{held:>8.2f} held, {expected:.2f}{more} expected on {ranks} ranks "
        f"({words}): {held / (expected + buckets + rest) - 1:+.1%}, {held / (expected + buckets) - 1:+.1%} without the "
        f"rest; "
        f"{found['measured_bytes'] / count:.2f} at the peak"
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bf16", "bf16-master", "bf16-pure"], default="float32")
    parser.add_argument("--update", choices=list(UPDATES), default="auto")
    parser.add_argument("--transport", choices=["auto", "shm", "torch"], default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="names of models, comma-separated")
    parser.add_argument("--placements", default=",".join(PLACEMENTS), help="comma-separated")
    parser.add_argument("--batches", default="", help="comma-separated")
    parser.add_argument("--held", action="store_true", help="bytes per parameter held when backward has ended")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(*json.loads(given.rank))
        return 0
    if given.held:
        given.dtype = "bf16-master"
        given.batches = given.batches or str(BATCHES[given.device][0])
    results: list[dict[str, Any]] = []
    for found in conduct(given):
        results.append(found)
        if given.json is not None:
            write(given, results)
    say(f"worst: {worst_of(results):.1%} of what was measured")
    return 0 if worst_of(results) <= 0.10 else 1


def worst_of(results: list[dict[str, Any]]) -> float:
    """By what part of what was measured a plan is off at most; 1 if a case has failed."""
    if not results or any("error" in result for result in results):
        return 1.0
    return float(max(abs(result["planned_bytes"] / result["measured_bytes"] - 1) for result in results))


def write(given: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    from paceline.bench.results import Circumstances, dump_json

    gpu = None
    if given.device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    report = {"schema": "paceline-plan-check/2", "circumstances": asdict(Circumstances.now(gpu)), "dtype": given.dtype}
    report |= {"optimizer": "adamw", "update": given.update, "transport": given.transport, "steps": STEPS[given.device]}
    report |= {"worst": worst_of(results), "results": results}
    given.json.write_text(dump_json(report))


if __name__ == "__main__":
    sys.exit(main())
