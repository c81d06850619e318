"""The command line, as far as nothing is measured."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from paceline.bench.__main__ import main as plain
from paceline.bench.commands import COMMANDS
from paceline.bench.contenders import CONTENDERS


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def paceline(*arguments: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{before}\nfrom paceline.cli import main\ntry:\n    main()\nfinally:\n    {after or 'pass'}"
    return run(code, *arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["bench", "step", "--help"]])
def test_help_loads_no_torch(arguments: Sequence[str]) -> None:
    done = paceline(*arguments, after="assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


def test_every_measurement_is_offered_with_its_options() -> None:
    listed = paceline("bench", "--help").stdout
    for name in COMMANDS:
        assert name in listed
    step = paceline("bench", "step", "--help").stdout
    for option in ("--model", "--micro-batch", "--contenders", "--zero-grad", "--accumulate", "--json", "--png"):
        assert option in step
    for contender in CONTENDERS:
        assert contender in step


def test_flags_take_no_value_in_help() -> None:
    plan = paceline("plan", "--help").stdout
    assert "--untied" in plan and "<int>" in plan
    assert "<bool>" not in plan


def test_settings_of_a_training_run_are_shown_in_groups() -> None:
    text = paceline("train", "--help").stdout
    places = [text.index(f"─ {group} ─") for group in ("Options", "Ranks", "Data", "Model", "Training", "Checkpoints")]
    assert places == sorted(places)
    assert "--no-print-config" not in text and "--no-compile" in text


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_line(missing: str) -> None:
    done = paceline("--help", before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"paceline: the command line needs {missing}, which is not installed: pip install 'paceline[cli]'"
    )


def test_bad_settings_are_one_line_and_exit_code_2() -> None:
    done = paceline("bench", "step", "--model", "gpt-9")
    assert done.returncode == 2
    assert "model='gpt-9': expected one of gpt-tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_extras_there_is_a_plain_entry() -> None:
    blocked = "import sys, runpy; sys.modules['typer'] = sys.modules['rich'] = None; "
    done = run(blocked + "runpy.run_module('paceline.bench', run_name='__main__')", "--help")
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_the_plain_entry_refuses_bad_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain(["step", "--ranks", "0"]) == 2
    assert "ranks=0: expected at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plain(["cost-model"])
    assert "choose from" in capsys.readouterr().err
