"""`paceline run --ranks MIN:MAX` with a script as users write it: a rank is killed, one joins, the digest is equal."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.nn import functional
import paceline

STEPS, HOLD = 60, 10

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index))

paceline.init(device="cpu")
torch.manual_seed(os.getpid())  # rank by rank another start: the first decides
generator = torch.Generator().manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
model = paceline.DistributedDataParallel(net, lanes=6, seed=5)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = paceline.Loader(Samples(), 2, lanes=6, seed=3)
if int(os.environ.get("PACELINE_MEMBER", 0)) > 1:
    Path("joins").touch()
run = paceline.Elastic(model=model, optimizer=optimizer, loader=loader)
batches = loader.endless()
while run.step < STEPS:
    while sys.argv[1] == "elastic" and run.step >= HOLD and not Path("joins").exists():
        time.sleep(0.01)
    if sys.argv[1] == "elastic" and run.step >= HOLD and run.generation < 2:
        time.sleep(0.02)  # the other is about to wait for its generation
    with run.attempt():
        for microbatch in model.lanes(next(batches), run.step):
            functional.mse_loss(model(microbatch), torch.zeros(len(microbatch), 4)).backward()
        with run.commit():
            optimizer.step()
        optimizer.zero_grad()
run.finish()
print("digest", paceline.digest(model, optimizer, run.step, loader), flush=True)
print("slot", os.environ["RANK"], "rank", paceline.get("rank"), "of", paceline.get("ws"), flush=True)
"""


def run(folder: Path, *flags: str, how: str) -> tuple[list[str], str]:
    """The lines that ranks print, and what is said beside them."""
    (folder / "train.py").write_text(SCRIPT)
    job = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", "--log-dir", str(folder / "runs"), *flags, "train.py", how],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=55,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return re.findall(r"^\[[^]]+\] (.*)$", job.stdout, re.MULTILINE), job.stderr


def digests(lines: list[str]) -> set[str]:
    return {line for line in lines if line.startswith("digest ")}


def test_rank_0_is_killed_and_another_joins_and_the_digest_is_that_of_a_quiet_run(tmp_path: Path) -> None:
    quiet, _ = run(tmp_path, "-n", "2", how="plain")
    lines, said = run(tmp_path, "--ranks", "1:2", "--fault", "kill rank=0 step=4 where=backward", how="elastic")
    assert len(digests(quiet)) == 1
    assert digests(lines) == digests(quiet), said
    assert {"slot 1 rank 0 of 2", "slot 0 rank 1 of 2"} <= set(lines)
    assert "rank 0 was killed by SIGKILL (at step 4)\n" in said
    assert re.search(r"generation 1: 1 rank goes on from step 4 after \d+\.\d\d s\n", said)
    assert re.search(r"generation 2: 2 ranks \(1 new\) go on from step \d+ after \d+\.\d\d s\n", said)
