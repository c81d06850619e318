"""Every example runs, with the launchers that its first lines name."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACELINE = (sys.executable, "-m", "paceline.cli", "run", "-n", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ALONE = (sys.executable,)
TIMEOUT_S = 100


def run(launcher: tuple[str, ...], name: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    tested = {"digits.py", "lanes.py", "own_model.py", "transformers_model.py"}
    assert {file.name for file in EXAMPLES.glob("*.py")} == tested


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("launcher", [PACELINE, TORCHRUN, ALONE], ids=["paceline", "torchrun", "alone"])
def test_the_same_script_under_every_launcher(launcher: tuple[str, ...], tmp_path: Path) -> None:
    said = run(launcher, "own_model.py", tmp_path, str(tmp_path / "checkpoints"))
    last = said.strip().splitlines()[-1]
    assert "epoch 4   step 256   loss" in last
    assert float(last.split()[-1]) < 0.1
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000200",
        "step-00000250",
    ]


@pytest.mark.timeout(TIMEOUT_S)
def test_lanes_print_one_digest_whatever_the_world(tmp_path: Path) -> None:
    said = [run(launcher, "lanes.py", tmp_path).partition(" rank(s) ") for launcher in (ALONE, PACELINE)]
    assert [ranks[-1] for ranks, _, _ in said] == ["1", "2"]
    assert said[0][2] == said[1][2] and "digest" in said[0][2]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
def test_digits_are_told_apart(tmp_path: Path) -> None:
    said = run(PACELINE, "digits.py", tmp_path)
    accuracy = said.strip().splitlines()[-1].split()[-1]
    assert float(accuracy.removesuffix("%")) > 95


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_model_of_the_transformers_library_learns(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in run(PACELINE, "transformers_model.py", tmp_path).strip().splitlines()]
    assert losses[-1] < losses[0] - 0.3
