"""Scripts of the user's under `paceline run`: hangs are found and named, slow work is left alone, exits may crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 100
LIMIT_S = 2.0
# What goes wrong is another thing in every attempt; in the last one everything is only slow.
LOOP = f"""
import atexit, ctypes, os, signal, sys, time
import torch
import paceline

world = paceline.init(device="cpu")
attempt, last = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
kinds = ["spin in forward", "keep the lock in data", "stop"]
kind = kinds[attempt] if attempt < last else "slow"
limit = {LIMIT_S}


def spin():
    while True:
        pass


class Net(torch.nn.Linear):
    step = 0

    def forward(self, x):
        if kind == "spin in forward" and world.rank == 1 and self.step == 3:
            spin()
        if not self.training:
            time.sleep(1.5 * limit)
        return super().forward(x)


class Sleeper:
    def state_dict(self):
        time.sleep(1.5 * limit)
        return {{"slept": True}}


net = Net(4, 4)
model = paceline.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    net.step = step
    if step == 3 and kind == "keep the lock in data" and world.rank == 0:
        ctypes.PyDLL(None).sleep(600)
    if step == 3 and kind == "stop" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if kind == "slow":
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    time.sleep(1.5 * limit)  # metrics, say
    model.train()
    paceline.Checkpointer(sys.argv[1]).save(5, model=model, slow=Sleeper())
    if world.rank == 0:
        time.sleep(1.4 * limit)  # what only one rank does, and nobody sees, while the other one waits
    model(torch.ones(2, 4)).sum().backward()
    if world.rank == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
paceline.shutdown()
print("finished")
"""


def run(folder: Path, script: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", "2", "--log-dir", str(folder / "runs"), *flags]
    return subprocess.run(
        [*command, str(path), str(folder / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_a_plain_loop_that_hangs_is_ended_and_the_rank_at_fault_is_named(tmp_path: Path) -> None:
    flags = ("--hang-timeout", str(LIMIT_S), "--max-restarts", "3", "--shutdown-timeout", "2")
    done = run(tmp_path, LOOP, *flags)
    told = [line.removeprefix("paceline run: ") for line in done.stderr.splitlines() if "start again" in line]
    assert done.returncode == 0, done.stderr
    assert len(told) == 3, done.stderr
    for line, (words, where) in zip(
        told,
        (
            ("rank 1 is busy but making no progress: no progress for", "s in forward (limit 2 s)"),
            ("rank 0 hangs in native code that holds the interpreter's lock (GIL): no", "s between steps (limit 4 s)"),
            ("rank 1 froze: stopped for", "(process state T)"),
        ),
        strict=True,
    ):
        assert line.startswith(words) and where in line and "at step 3" in line, line
    assert "finished" in done.stdout
    assert "paceline run: rank 1 was killed by SIGSEGV during exit, after its work was done\n" in done.stderr


RESTS = """
import time, torch, paceline

world = paceline.init(device="cpu")


class Net(torch.nn.Linear):
    def forward(self, x):
        if self.late:
            rest()
        return super().forward(x)


def rest():
    end = time.monotonic() + 7
    while time.monotonic() < end:
        pass  # here


net = Net(4, 4)
net.late = False
model = paceline.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(17):
    net.late = step == 15 and world.rank == 1
    time.sleep(0.15)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("finished")
"""


def test_a_rank_that_others_wait_for_is_named_with_its_line_and_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, RESTS)
    assert done.returncode == 0 and "[0-1] finished" in done.stdout, done.stderr
    told = next(line for line in done.stderr.splitlines() if "rank 1 makes no progress" in line)
    assert told.startswith("paceline run: rank 1 makes no progress for ") and "in forward" in told, told
    line = next(number for number, text in enumerate(RESTS.splitlines(), start=1) if "here" in text)
    assert f"script.py:{line} in rest; rank 0 waits for it" in told or f"script.py:{line - 1} in rest; rank 0" in told


PLAIN = """
import ctypes, os, sys, time
import torch

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))


def rest():
    time.sleep(600)  # here


for step in range(5):
    if step == 3 and rank == 1 and attempt == 0:
        rest()
    if step == 3 and rank == 0 and attempt == 1:
        ctypes.PyDLL(None).sleep(600)
    model(torch.ones(2, 4)).sum().backward()
torch.distributed.destroy_process_group()
print("finished", flush=True)
os._exit(0)  # threads of gloo may crash while Python ends: nothing of ours waits for them in such a script
"""


@pytest.mark.timeout(TIMEOUT_S)
def test_a_hang_of_a_script_without_our_class_is_found_where_a_limit_was_given(tmp_path: Path) -> None:
    # No Python runs while torch is loaded, which takes seconds on a busy machine.
    flags = ("--hang-timeout", "5", "--max-restarts", "2", "--shutdown-timeout", "2")
    done = run(tmp_path, PLAIN, *flags)
    told = [line.removeprefix("paceline run: ") for line in done.stderr.splitlines() if "start again" in line]
    assert done.returncode == 0 and "[0-1] finished" in done.stdout, done.stderr
    assert len(told) == 2, done.stderr
    line = next(number for number, text in enumerate(PLAIN.splitlines(), start=1) if "here" in text)
    assert told[0].startswith("rank 1 froze: no rank has done anything for "), told
    assert f"script.py:{line} in rest" in told[0] and "rank 0 in " in told[0], told
    assert told[1].startswith("rank 0 hangs in native code that holds the interpreter's lock (GIL): no rank"), told
