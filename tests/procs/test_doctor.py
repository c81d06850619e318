"""`paceline doctor` on this machine, healthy and not."""

import os
import subprocess
import sys
from pathlib import Path


def doctor(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "paceline.cli", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=55, check=False, env={**os.environ, **environment}
    )


def test_a_healthy_machine() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    for about in ("environment", "launcher", "devices", "ports", "limits", "backends", "all-reduce", "choice"):
        assert f"{about:<12} " in done.stdout
    assert "2 ranks over gloo: 25 MiB in " in done.stdout
    assert "2 ranks over paceline's choice: 25 MiB in " in done.stdout
    assert "transport='auto' takes shared memory for CPU tensors" in done.stdout
    assert done.stdout.endswith("nothing is broken\n")


TRAINS = """
import torch, paceline

class Noise(torch.nn.Module):
    source = torch.Generator()
    source.seed()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.source)

torch.manual_seed(0)
paceline.init(device="cpu")
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), Noise())
model = paceline.DistributedDataParallel(net, lanes=2)
for step in range(10**9):
    for x in model.lanes([torch.ones(3, 2)] * 2, step):
        model(x).sum().backward()
    model.zero_grad()
"""


def test_a_script_with_randomness_of_its_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "does_not.py").write_text("import sys; print('with', sys.argv[1:])")
    done = doctor("--steps", "1", "--determinism", str(tmp_path / "trains.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "two runs of trains.py DIFFER first in the output of 2 (Noise), step 0, lane 0" in done.stdout
    assert "threads: " in done.stdout
    done = doctor("--determinism", str(tmp_path / "does_not.py"), "--steps", "3")
    assert done.returncode == 2
    assert "ended without a replica" in done.stderr
    assert "with ['--steps', '3']" in done.stderr, "all behind the script belongs to it"
    done = doctor("--determinism", str(tmp_path / "nowhere.py"))
    assert done.returncode == 2
    assert "nowhere.py' does not exist" in done.stderr


def test_what_is_broken_is_said() -> None:
    done = doctor(RANK="0", GLOO_SOCKET_IFNAME="no-such-interface")
    assert done.returncode == 1
    assert "RANK=0 is set but WORLD_SIZE is not" in done.stdout
    assert "GLOO_SOCKET_IFNAME=no-such-interface; interfaces here: lo" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("broken")
