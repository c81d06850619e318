"""`paceline plan` as a command: figures without torch, one line and exit code 2 for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from paceline.cli import main

try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""


def paceline_plan(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=folder)


def test_the_question_of_the_documentation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    question = "--params 124M --batch 8 --seq 1024 --vocab 50304 --dtype bf16 --optimizer adamw --ranks 1,2,4,8"
    files = ["--json", str(tmp_path / "plan.json"), "--png", str(tmp_path / "plan.png")]
    done = paceline_plan(*question.split(), "--device-memory", "24GiB", *files)
    assert done.returncode == 0, done.stderr
    for words in ("= 16 bytes per parameter", "8 ranks", "logits and loss", "fits", "largest batch", "sent per step"):
        assert words in done.stdout
    report = json.loads((tmp_path / "plan.json").read_text())
    assert [item["ranks"] for item in report["by_ranks"]] == [1, 2, 4, 8]
    assert report["by_ranks"][0]["total_bytes"] == sum(line["bytes"] for line in report["by_ranks"][0]["lines"])
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "fp8"], "dtype='fp8': expected one of float32, bf16"),
        (["--params", "12Q"], "params='12Q': expected a count such as 124M"),
        (["--batch", "-3"], "batch=-3: expected a whole number, at least 1"),
        (["--device-memory", "big"], "device_memory='big': expected a size such as 24GiB"),
        (["--update", "magic"], "update='magic': expected one of auto, foreach, fused, loop"),
        (["--json", "no/such/plan.json"], "json='no/such/plan.json': expected a file in an existing folder"),
        (["--png", "plan.foo"], "png='plan.foo': expected a file that ends in .png, .svg, .pdf"),
        (["--heads", "0"], "heads=0: expected a whole number, at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = paceline_plan(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
    assert not list(tmp_path.iterdir())
