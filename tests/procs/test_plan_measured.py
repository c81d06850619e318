"""A plan beside what a real process takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.memory_plan.measured import Peak
from paceline.memory_plan.numbers import PlanError

ROOT = Path(__file__).parents[2]
MIB = 2**20


@pytest.mark.timeout(150)
@pytest.mark.parametrize("batch", [2, 8])
def test_the_plan_is_within_a_tenth_of_what_tensors_take(batch: int) -> None:
    """Every block is mapped by itself here: the holes in malloc's heap differ by a tenth from run to run."""
    shape = {"vocabulary": 2048, "width": 256, "layers": 4, "heads": 4, "context": 128}
    case = json.dumps([{"name": "small", **shape, "batch": batch}, "cpu", "float32", "auto"])
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_check.py"), "--one", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    without_holes = result["planned_bytes"] - result["lines"]["holes in malloc's heap"]
    assert without_holes == pytest.approx(result["measured_bytes"], rel=0.10)
    assert result["closed_form_bytes"] == pytest.approx(result["planned_bytes"], rel=0.02)


# One of two ranks: it trains twice, first a tiny model, for which torch loads its libraries.
RANK = """
import json, sys, torch
import paceline
from paceline.memory_plan.measured import Peak
from paceline.memory_plan.of_model import plan
from paceline.train.model import GPT
from paceline.train.sizes import Shape

placement = sys.argv[1]
torch.set_num_threads(1)
world = paceline.init(device="cpu")


def train(shape, vocabulary, batch, peak=None):
    model = paceline.DistributedDataParallel(GPT(shape, vocabulary), placement=placement)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    tokens = torch.zeros(batch, shape.context, dtype=torch.long)
    for step in range(3):
        if step == 1 and peak is not None:
            peak.restart()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 0 if peak is None else peak.nbytes()  # while the buckets, which ranks share, are still there


train(Shape(2, 64, 2, 16), 64, 1)
shape, batch = Shape(layers=8, width=768, heads=8, context=128), torch.zeros(2, 128, dtype=torch.long)
with torch.device("meta"):
    skeleton = GPT(shape, 8192)
planned = plan(skeleton, (batch, batch), ranks=world.size, placement=placement, fused=True)
measured = train(shape, 8192, 2, Peak("cpu"))
if world.rank == 0:
    print(json.dumps([planned.total, measured]))
paceline.shutdown()
"""


@pytest.mark.timeout(100)
# Not zero3: what waits for memory there depends on how late ranks are, and a plan was up to 13 % too low.
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2"])
def test_the_plan_of_a_placement_is_near_what_a_rank_takes(placement: str, tmp_path: Path) -> None:
    """63 million parameters on two ranks: 0.9 to 1.2 GiB each."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(program), placement], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    planned, measured = json.loads(done.stdout.splitlines()[-1])
    assert measured > 500 * MIB
    assert planned == pytest.approx(measured, rel=0.10)


def test_a_peak_is_seen_after_the_memory_is_gone() -> None:
    peak = Peak("cpu")
    held = bytearray(64 * MIB)
    del held
    assert peak.nbytes() == pytest.approx(64 * MIB, rel=0.1)
    peak.restart()
    assert peak.nbytes() < 16 * MIB


def test_other_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="device='tpu': expected cpu or cuda"):
        Peak("tpu")
