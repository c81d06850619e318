"""The memory plan beside what training really takes: GPTs of several sizes, each in a fresh process.

    python benchmarks/plan_check.py --device cpu --json benchmarks/<date>-<hardware>-plan.json

A process warms torch up with a tiny model, notes its memory, builds the model, trains three steps with AdamW, and tells
the highest point: growth of the resident set on the CPU, `max_memory_allocated` on a GPU. The plan is made in that
process too, after the measurement, from the model's shapes alone; the closed form is made from its numbers.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 3
# What torch's optimizer is told for each of `paceline plan --update`.
UPDATES: dict[str, dict[str, bool | None]] = {
    "auto": {"foreach": None, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
    "loop": {"foreach": False, "fused": False},
}


@dataclass(frozen=True)
class Case:
    """One model, one batch."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    batch: int


SHAPES = {
    "cpu": {
        "5m": (4096, 256, 4, 4, 128),
        "34m": (8192, 512, 8, 8, 128),
        "bytes-29m": (256, 512, 9, 8, 256),
        "gpt2-untied": (50304, 768, 12, 12, 256),
    },
    "cuda": {
        "34m": (8192, 512, 8, 8, 1024),
        "gpt2": (50304, 768, 12, 12, 1024),
        "gpt2-medium": (50304, 1024, 24, 16, 1024),
        "gpt2-large": (50304, 1280, 36, 20, 1024),
    },
}
BATCHES = {"cpu": (2, 8), "cuda": (2, 16)}


def cases(device: str, only: str) -> list[Case]:
    chosen = only.split(",") if only else list(SHAPES[device])
    return [Case(name, *SHAPES[device][name], batch) for name in chosen for batch in BATCHES[device]]


def conduct(device: str, dtype: str, update: str, only: str, file: Path | None) -> bool:
    results = []
    say(f"{'model':<14}{'params':>9}{'batch':>7}{'measured':>11}{'plan':>11}{'off':>8}{'closed form':>13}{'off':>8}")
    for case in cases(device, only):
        settings = json.dumps([asdict(case), device, dtype, update])
        command = [sys.executable, __file__, "--one", settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            say(f"{case.name} at batch {case.batch}: {done.stderr.strip().splitlines()[-1]}")
            results.append({**asdict(case), "error": done.stderr[-2000:]})
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        results.append(found)
        off, closed_off = (found[key] / found["measured_bytes"] - 1 for key in ("planned_bytes", "closed_form_bytes"))
        say(
            f"{case.name:<14}{found['parameters'] / 1e6:>7.1f} M{case.batch:>7}{mib(found['measured_bytes']):>11}"
            f"{mib(found['planned_bytes']):>11}{off:>+8.1%}{mib(found['closed_form_bytes']):>13}{closed_off:>+8.1%}"
        )
    good = [result for result in results if "error" not in result]
    worst = max(abs(result["planned_bytes"] / result["measured_bytes"] - 1) for result in good) if good else 1.0
    say(f"worst: {worst:.1%} of what was measured")
    if file is not None:
        import torch

        from paceline.bench.results import Circumstances, dump_json

        where = Circumstances.now(torch.cuda.get_device_name() if device == "cuda" else None)
        report = {"schema": "paceline-plan-check/1", "circumstances": asdict(where), "dtype": dtype}
        report |= {"optimizer": "adamw", "update": update, "steps": STEPS, "worst": worst, "results": results}
        file.write_text(dump_json(report))
    return worst <= 0.10 and len(good) == len(results)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def one(case: Case, device: str, dtype: str, update: str) -> dict[str, Any]:
    """Measure in this process, then plan."""
    from contextlib import nullcontext

    import torch

    from paceline.bench.gpt import BenchGPT
    from paceline.bench.spec import GPTShape
    from paceline.memory_plan.closed_form import PlanSettings
    from paceline.memory_plan.measured import Peak
    from paceline.memory_plan.of_model import plan

    ways: dict[str, Any] = UPDATES[update]

    def train(shape: GPTShape, batch: int, steps: int) -> tuple[BenchGPT, Any, list[int]]:
        torch.manual_seed(0)
        kind = torch.float32 if dtype in ("float32", "bf16") else torch.bfloat16
        model = BenchGPT(shape).to(device, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **ways)
        text = torch.randint(shape.vocabulary, (batch, shape.context + 1), device=device)
        x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        peaks = []
        for _ in range(steps):
            peak.restart()
            with torch.autocast(device, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext():
                loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            peaks.append(peak.nbytes())
        return model, (x, y), peaks

    peak = Peak(device)
    train(GPTShape(64, 64, 2, 2, 16), 2, 2)
    peak = Peak(device)
    shape = GPTShape(case.vocabulary, case.width, case.layers, case.heads, case.context)
    model, batch, peaks = train(shape, case.batch, STEPS)
    planned = plan(model, batch, dtype=dtype, **ways)
    closed = PlanSettings(
        params=planned.parameters,
        batch=case.batch,
        seq=case.context,
        vocab=case.vocabulary,
        layers=case.layers,
        width=case.width,
        heads=case.heads,
        untied=True,
        dtype=dtype,
        device=device,
        ranks=(1,),
        update=update,
    ).plan()
    return {
        **asdict(case),
        "parameters": planned.parameters,
        "measured_bytes": max(peaks[1:]),
        "measured_by_step": peaks,
        "planned_bytes": planned.total,
        "peak_moment": planned.by_ranks[0].peak.name,
        "closed_form_bytes": closed.total,
        "lines": {line.name: line.nbytes for line in planned.lines},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bf16", "bf16-pure"], default="float32")
    parser.add_argument("--update", choices=["auto", "foreach", "fused", "loop"], default="auto")
    parser.add_argument("--only", default="", help="names of models, comma-separated")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        case, device, dtype, update = json.loads(given.one)
        say(json.dumps(one(Case(**case), device, dtype, update)))
        return 0
    return 0 if conduct(given.device, given.dtype, given.update, given.only, given.json) else 1


if __name__ == "__main__":
    sys.exit(main())
