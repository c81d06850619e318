"""How long an elastic job takes to go on after a rank was killed: until that is said, until the survivors have formed
the next generation, until they have redone the step, and until all ranks are there again.

    python benchmarks/recovery_times.py --repeats 5
    python benchmarks/recovery_times.py --repeats 3 --device cuda --ranks 3 --spares 0

Each job trains a small model; one rank is killed by SIGKILL in the backward of a step. On a CUDA device the ranks talk
by NCCL; each takes itself for a host of its own, so that several may share a device. Every time is counted from the
moment at which the rank says that it is about to be killed. A step of the script takes `--step-s` at least, which is
not counted: what is shown as "redone" is less one step's time.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.bench.results import Circumstances, dump_json
from paceline.faults import parse
from paceline.launch import ElasticTerms, Formed, Job, Listener, Loss, supervise

STEP, LAST = 20, 4000
SPARE_S = 20.0  # a spare has to be there before the fault
SCRIPT = """
import os, sys, time
import torch
import paceline
from paceline.rank_report import report

os.environ["NCCL_HOSTID"] = "slot " + os.environ["LOCAL_RANK"]
world = paceline.init(device=sys.argv[4])
net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(world.device)
model = paceline.DistributedDataParallel(net, lanes=12, seed=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = paceline.Elastic(model=model, optimizer=optimizer)


def ends():
    # Three steps after the world was full again: all ranks enter that generation at one step, so they agree.
    global last
    if run.generation > 0 and paceline.get("ws") == int(sys.argv[3]):
        last = min(last, run.step + 3)


target, last = float(sys.argv[1]), int(sys.argv[2])
ends()
while run.step < last:
    begun = time.monotonic()
    with run.attempt():
        for microbatch in model.lanes([torch.ones(4, 256, device=world.device) for _ in model.own_lanes], run.step):
            model(microbatch).square().mean().backward()
        with run.commit():
            optimizer.step()
        optimizer.zero_grad()
    time.sleep(max(0.0, target - (time.monotonic() - begun)))
    report("committed", step=run.step)
    ends()
run.finish()
"""


@dataclass
class Times(Listener):
    """What is seen of one job, in seconds after the fault."""

    full: int
    step_s: float
    step: int
    killed_at: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)

    def _see(self, what: str, less_s: float = 0.0) -> None:
        if self.killed_at:
            self.seen.setdefault(what, round(time.monotonic() - self.killed_at - less_s, 4))

    def reported(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if kind == "fault":
            self.killed_at = time.monotonic()
        elif kind == "committed" and fields["step"] > self.step and "formed" in self.seen:
            self._see("redone", self.step_s)

    def lost(self, loss: Loss) -> None:
        self._see("named")

    def formed(self, formed: Formed) -> None:
        self._see("formed")
        if formed.generation.size == self.full:
            self._see("full strength")


def measure(ranks: int, spares: int, victim: int, step_s: float, device: str, folder: Path) -> dict[str, float]:
    """One job."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    step = STEP + (int(SPARE_S / step_s) if spares else 0)
    times = Times(ranks, step_s, step)
    terms = ElasticTerms(minimum=1, maximum=ranks, spares=spares)
    job = Job(
        command=(sys.executable, "-u", str(script), str(step_s), str(LAST), str(ranks), device),
        ranks=ranks,
        run_dir=folder / "logs",
        elastic=terms,
        faults=(parse(f"kill rank={victim} step={step} where=backward"),),
    )
    outcome = supervise(job, times)
    assert outcome.exit_code == 0, outcome
    return times.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write all samples here")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for repeat in range(given.repeats):
        for spares in given.spares:
            for victim in (0, given.ranks - 1):
                with tempfile.TemporaryDirectory() as folder:
                    seen = measure(given.ranks, spares, victim, given.step_s, given.device, Path(folder))
                name = f"{spares} spares, rank {victim} killed"
                found.setdefault(name, []).append(seen)
                sys.stdout.write(f"{repeat} {name}: {seen}\n")
                sys.stdout.flush()
    for name, samples in found.items():
        medians = {what: statistics.median(sample[what] for sample in samples) for what in samples[0]}
        sys.stdout.write(f"{name}: " + ", ".join(f"{what} {value:.3f} s" for what, value in medians.items()) + "\n")
    if given.json:
        gpu = torch.cuda.get_device_name() if given.device == "cuda" else None
        given.json.write_text(dump_json({"circumstances": asdict(Circumstances.now(gpu)), "samples": found}))


if __name__ == "__main__":
    main()
