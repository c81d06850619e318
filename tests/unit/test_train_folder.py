"""The folder of a run: nothing in it is written over."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder


def config_for(path: Path, **settings: object) -> TrainConfig:
    return replace(TrainConfig(out=str(path), batch=2), **settings)  # type: ignore[arg-type]


def prepare_elsewhere(path: Path) -> str:
    """What another process is told that wants to train in `path`."""
    script = (
        "import sys; from paceline.train.config import TrainConfig; from paceline.train.run_folder import RunFolder\n"
        "try: RunFolder.prepare(TrainConfig(out=sys.argv[1]))\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_run_is_taken_up_with_the_same_settings(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    first = RunFolder.prepare(config)
    assert first.config() == config
    first.release()
    longer = replace(config, steps=2000, ranks=3)
    again = RunFolder.prepare(longer)
    assert again.config().steps == 2000
    again.release()


def test_a_run_that_is_made_longer_keeps_its_rates(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", steps=100)

    def decay_steps(settings: TrainConfig) -> int:
        folder = RunFolder.prepare(settings)
        folder.release()
        return folder.config().decay_steps

    assert decay_steps(config) == 0, "as many as there are steps"
    assert decay_steps(replace(config, steps=120)) == 0, "no step was made yet"
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert decay_steps(replace(config, steps=120)) == 0
    assert decay_steps(replace(config, steps=200)) == 120
    assert decay_steps(replace(config, steps=300)) == 120
    assert decay_steps(replace(config, steps=300, decay_steps=300)) == 300, "who asks for other rates gets them"


def test_a_run_is_not_taken_up_as_another_one(tmp_path: Path) -> None:
    first = RunFolder.prepare(config_for(tmp_path / "run"))
    said = f"another `paceline train` is running in {tmp_path / 'run'} (process {os.getpid()} on "
    assert said in prepare_elsewhere(tmp_path / "run")
    first.release()
    assert prepare_elsewhere(tmp_path / "run") == ""
    RunFolder.prepare(config_for(tmp_path / "run", batch=4)).release()  # no step was made with the other value
    RunFolder.prepare(config_for(tmp_path / "run")).release()
    first.metrics_file.write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(
        UsageError, match=r"was started with batch=2, got batch=4; .*expected batch=2, or another --out"
    ):
        RunFolder.prepare(config_for(tmp_path / "run", batch=4))
    with pytest.raises(UsageError, match=r"already holds a run, which resume='never' would overwrite"):
        RunFolder.prepare(config_for(tmp_path / "run", resume="never"))


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(UsageError, match=r"is not empty and holds no run"):
        RunFolder.prepare(config_for(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_metrics_are_cut_where_a_run_resumes(tmp_path: Path) -> None:
    folder = RunFolder.prepare(config_for(tmp_path / "run"))
    folder.release()
    assert folder.cut_metrics(0) == 0
    folder.metrics_file.write_text(
        "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 8)) + '{"step": 8, "l'
    )
    assert folder.cut_metrics(5) == 2
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4, 5]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"is not a folder"):
        RunFolder.prepare(config_for(tmp_path / "file"))
