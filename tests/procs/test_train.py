"""`paceline train` as users start it: real launcher, real ranks, real kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

TIMEOUT_S = 100
SETTINGS = (
    "--size",
    "nano",
    "--steps",
    "16",
    "--warmup",
    "4",
    "--batch",
    "1",
    "--eval-every",
    "8",
    "--eval-samples",
    "8",
)
TWO = ("--device", "cpu", "--ranks", "2")
QUICK = (*SETTINGS, "--save-every", "4", "--sample", "20", "--dropout", "0.1", "--seed", "3", "--threads", "1", *TWO)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is read in no time."""
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {n + n}.\n" for n in range(3000)))
    return file


class Training:
    """One `paceline train` under way."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "train", *arguments, "--out", str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            )

    def ended(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def output(self) -> str:
        return self._log.read_text()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def reach(self, step: int) -> None:
        """Return when some rank has written the numbers of `step`."""
        deadline = time.monotonic() + TIMEOUT_S
        while f'"step": {step}, "loss"' not in self._metrics():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def steps(self) -> list[int]:
        lines = [json.loads(line) for line in self._metrics().splitlines()]
        return [line["step"] for line in lines if "loss" in line]

    def _metrics(self) -> str:
        file = self.folder / "metrics.jsonl"
        return file.read_text() if file.exists() else ""

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, by rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        ranks = [child for child in children if "paceline.train" in child.cmdline()]
        return sorted(ranks, key=lambda child: int(child.environ()["RANK"]))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Training] = []

    def begin(name: str, *arguments: str, **environment: str) -> Training:
        started.append(Training(tmp_path / name, *arguments, **environment))
        return started[-1]

    yield begin
    for training in started:
        if training.process.poll() is None:
            training.process.kill()
            training.process.wait()


@pytest.fixture(scope="module")
def quiet(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run that nothing happened to."""
    training = Training(tmp_path_factory.mktemp("quiet") / "run", *QUICK, "--data", str(text), "--audit")
    assert training.ended() == 0, training.output()
    return training


@pytest.mark.timeout(TIMEOUT_S)
def test_a_run_leaves_all_its_files_and_says_where(quiet: Training) -> None:
    names = {file.name for file in quiet.folder.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "result.json", "loss.png", "report.html", "checkpoints"}
    assert names >= {"rank_0.log", "rank_1.log", "weights.safetensors", "sample_log"}
    result = quiet.result()
    assert (result["steps"], result["ended"], result["ranks"], result["lanes"]) == (16, "finished", 2, 8)
    assert len(result["digest"]) == 64
    assert result["gradient_difference"] < 1e-6
    assert result["memory_planned"] > 0 and result["memory_measured"] > 0
    page = (quiet.folder / "report.html").read_text()
    assert f"torch {version('torch')}" in page and result["date"] in page and " cores" in result["machine"]
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")
    said = quiet.output()
    for word in (
        "nats per byte",
        "tokens/s",
        "hidden behind backward",
        "gradient difference",
        "planned",
        "report.html",
    ):
        assert word in said
    assert len(said[said.index("Next:") :].strip().splitlines()) == 4


def test_every_step_is_in_the_metrics_once(quiet: Training) -> None:
    lines = [json.loads(line) for line in (quiet.folder / "metrics.jsonl").read_text().splitlines()]
    assert quiet.steps() == list(range(1, 17))
    assert [line["step"] for line in lines if "held_out" in line] == [8, 16]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_stopped_and_resumed_is_the_run_that_was_not_stopped(quiet: Training, text: Path, start: Any) -> None:
    first = start("run", *QUICK, "--data", str(text))
    first.reach(5)
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == 143, first.output()
    stopped = first.result()
    assert stopped["ended"] == "stopped" and stopped["steps"] < 16, first.output()
    second = start("run", *QUICK, "--data", str(text), "--ranks", "1")  # lanes give the same bits in any world
    assert second.ended() == 0, second.output()
    assert f"resumed from step {stopped['steps']}; 0 step(s)" in second.output()
    assert second.result()["digest"] == quiet.result()["digest"]


@pytest.mark.timeout(TIMEOUT_S)
def test_a_finished_run_is_found_finished(quiet: Training) -> None:
    before, metrics = quiet.result(), (quiet.folder / "metrics.jsonl").read_text()
    again = Training(quiet.folder)
    assert again.ended() == 0, again.output()
    after = again.result()
    assert (after["digest"], after["steps"], after["own_steps"]) == (before["digest"], 16, 0)
    assert after["step_seconds"] == before["step_seconds"] and after["memory_measured"] == before["memory_measured"]
    assert (quiet.folder / "metrics.jsonl").read_text() == metrics


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_killed_rank_is_named_and_the_run_ends_by_itself(quiet: Training, text: Path, start: Any) -> None:
    training = start("run", *QUICK, "--data", str(text), "--max-restarts", "3")
    training.reach(6)
    training.ranks()[1].kill()
    assert training.ended() == 0, training.output()
    assert "restart 1 of 3: rank 1 was killed by SIGKILL" in training.output()
    assert training.result()["digest"] == quiet.result()["digest"]
    assert training.result()["redone_steps"] >= 1
    assert training.steps() == list(range(1, 17))


# A tracker that keeps what it gets.
KEEPING = """
import json, os
def init(**_): log({"opened": 1}, 0)
def finish(): log({"closed": 1}, 0)
def log(numbers, step):
    with open(os.environ["KEPT"], "a") as file:
        file.write(json.dumps({**numbers, "step": step, "slot": os.environ["RANK"]}) + "\\n")
"""


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("placement", ["ddp", "zero1"])
def test_a_killed_rank_is_outlived(quiet: Training, text: Path, start: Any, tmp_path: Path, placement: str) -> None:
    """Rank 0 dies, and the other goes on with its state, its files and its tracker; from a checkpoint, if it had but a
    shard."""
    (tmp_path / "trackio.py").write_text(KEEPING)
    kept = tmp_path / "kept.jsonl"
    flags = ("--placement", placement, "--min-ranks", "1", "--fault", "kill rank=0 step=11", "--trackers", "trackio")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    training = start("run", *QUICK, "--data", str(text), *flags, PYTHONPATH=path, KEPT=str(kept))
    assert training.ended() == 0, training.output()
    tracked = [json.loads(line) for line in kept.read_text().splitlines()]
    steps = [line["step"] for line in tracked if "loss" in line]
    assert (steps if placement == "ddp" else sorted(set(steps))) == list(range(1, 17))
    assert [line["slot"] for line in tracked if "opened" in line] == ["0", "1"]
    assert [line["slot"] for line in tracked if "closed" in line] == ["1"]
    assert training.result()["digest"] == quiet.result()["digest"]
    assert training.result()["redone_steps"] in ([0] if placement == "ddp" else [3, 7])  # steps 4 and 8 were saved
    assert "rank 0 was killed by SIGKILL (at step 11)" in training.output()
    assert training.steps() == list(range(1, 17))


# A tracker runs in rank 0, between steps: it fails once, and in the first attempt flips one bit of a weight there.
FLIPPING = """
import gc, os, torch
def init(**_): pass
def finish(): pass
def log(numbers, step):
    if step == 5 and "loss" in numbers and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from paceline.train.model import GPT
        for net in [found for found in gc.get_objects() if isinstance(found, GPT)]:
            net.norm.weight.detach().view(torch.int32)[3] ^= 1 << 20
    if step == 1:
        raise RuntimeError("the server of the tracker is away")
"""


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_restart_after_drift_goes_on_from_before_it(quiet: Training, text: Path, start: Any, tmp_path: Path) -> None:
    """F26. Only the saves compare here, so it is the one of step 8 that finds what happened after step 5."""
    (tmp_path / "trackio.py").write_text(FLIPPING)
    flags = ("--max-restarts", "1", "--check-every", "0", "--trackers", "trackio")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    training = start("run", *QUICK, "--data", str(text), *flags, PYTHONPATH=path)
    assert training.ended() == 0, training.output()
    said = training.output()
    assert "restart 1 of 1: ranks 0-1 raised paceline.errors.ReplicaDrift: step 8 is not saved: " in said, said
    assert "ranks 0 and 1 differ in norm.weight" in said and "resumed from step 4" in said, said
    assert said.count("the tracker trackio failed at step 1 (RuntimeError: the server of the tracker is away)") == 1
    assert training.result()["digest"] == quiet.result()["digest"]
    manifests = training.folder.glob("checkpoints/step-*/manifest.json")
    assert [json.loads(file.read_text())["compared"] for file in manifests] == [2, 2]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "huge"), "size='huge': expected one of nano, tiny"),
        (("--data", "no/such/file"), "data='no/such/file': no such file, folder or match"),
        (("--batch", "-1"), "batch=-1: expected at least 0"),
        (("--lanes", "1"), "2 ranks and lanes=1: expected at least one lane per rank"),
        (("--data", "{short}", "--context", "4000"), "context=4000 is longer than the"),
        (("--data", "{short}", "--context", "16", "--batch", "64"), "samples"),
        (("--layers", "900", "--width", "16384", "--heads", "16"), "2 ranks: each does NOT fit in "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, start: Any
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too little text to train on, " * 20)
    training = start("run", *TWO, *(argument.replace("{short}", str(short)) for argument in arguments))
    assert training.ended() == 2, training.output()
    lines = training.output().strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("paceline train: ")
    assert "Traceback" not in training.output()
