"""Secrets in the environment of a job, and the keys of a notebook: in no command line, which every user of a machine
can read, and in nothing that is written."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.listeners import tree_of

JOB_S = 55
SECRET = "f6e1c0ffee5ec2e7"
SECRETS = {
    name: f"{SECRET}-{name}"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")
}
TRAIN = "--size nano --steps 2 --warmup 1 --batch 1 --device cpu --ranks 2 --threads 1 --sample 0 --data text --out out"
FAILS = """
import os, torch, paceline
assert os.environ["WANDB_API_KEY"]
paceline.init()
agreement = paceline.Agreement(capsules="capsules")
model = paceline.DistributedDataParallel(torch.nn.Linear(8, 4), agreement=agreement)
loader = paceline.Loader(torch.ones(64, 8), batch_size=8, sample_log="samples")
with paceline.Checkpointer("checkpoints") as checkpoints:
    for step, batch in enumerate(loader):
        model(batch).sum().backward()
        checkpoints.save(step, model=model, loader=loader)
        raise ValueError("it fails")
"""
NOTEBOOK = """
import sys
from jupyter_core.utils import ensure_event_loop
ensure_event_loop()
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
kernels = RankKernels(StartOptions(2, gpu_ids=()), lambda seen: None)
print("ready", flush=True)
sys.stdin.read()
kernels.close()
"""


def command_lines(pids: Sequence[int]) -> str:
    found = []
    for pid in pids:
        with suppress(OSError):  # it has just ended
            found.append(Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace"))
    return "\n".join(found)


def run_with(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], done: Callable[[], bool] = lambda: False
) -> str:
    """Run a job to its end, or until it is `done`, and return all command lines that it had. What it has written is in
    `folder`."""
    seen: set[str] = set()
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    until = time.monotonic() + JOB_S
    try:
        while job.poll() is None and time.monotonic() < until and not done():
            seen.add(command_lines(tree_of(job.pid)))
            time.sleep(0.03)
        if done():
            job.communicate(timeout=20)
    finally:
        job.kill()
        job.communicate()
    return "\n".join(seen)


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_secrets_are_in_no_command_line_and_in_no_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    seen = run_with((sys.executable, "-m", "paceline.cli", "train", *TRAIN.split()), tmp_path, SECRETS)
    assert (tmp_path / "out" / "report.html").exists(), (tmp_path / "output").read_text()
    assert "paceline.train" in seen, "the ranks were not seen"
    assert SECRET not in seen
    assert not files_with(SECRET, tmp_path)


def test_neither_are_they_where_a_script_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    seen = run_with((sys.executable, "-m", "paceline.cli", "run", "-n", "2", "script.py"), tmp_path, SECRETS)
    assert "it fails" in (tmp_path / "output").read_text()
    assert list(tmp_path.glob("runs/*/rank_1.log"))
    assert "script.py" in seen
    assert SECRET not in seen
    assert not files_with(SECRET, tmp_path)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets have names that are short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        yield Path(folder)


def test_the_keys_of_a_notebook_are_known_to_its_user_alone(short_path: Path) -> None:
    (short_path / "notebook.py").write_text(NOTEBOOK)
    environment = {**SECRETS, "TMPDIR": str(short_path)}
    keys: dict[str, int] = {}

    def ready() -> bool:
        for file in short_path.glob("paceline-notebook-*/*.json"):
            with suppress(OSError, ValueError):  # not written yet
                keys[json.loads(file.read_text())["key"]] = (file.stat().st_mode | file.parent.stat().st_mode) & 0o077
        return "ready" in (short_path / "output").read_text()

    seen = run_with((sys.executable, "notebook.py"), short_path, environment, ready)
    assert "ready" in (short_path / "output").read_text()
    assert len(keys) == 2
    assert set(keys.values()) == {0}, "others may read the file or enter its folder"
    assert "paceline.notebook.rank" in seen
    for secret in (*keys, SECRET):
        assert secret not in seen
        assert not files_with(secret, short_path)
