"""The trainer in lanes: one digest and one series of losses, whatever the world, the transport or the resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import NotFiniteGradients
from paceline.train.__main__ import code_of
from paceline.train.config import NOT_FINITE_EXIT, TrainConfig, to_toml
from paceline.train.loop import build_run, run_rank
from paceline.train.run_folder import RunFolder
from paceline.train.run_state import resume, save
from paceline.train.samples import prepare
from tests.pool import Outcome, Pool

CONFIG = TrainConfig(
    size="nano",
    layers=1,
    context=16,
    steps=6,
    decay_steps=6,
    warmup=2,
    batch=1,
    accumulate=2,
    dropout=0.2,
    seed=7,
    eval_every=3,
    eval_samples=5,
    save_every=0,
    sample=0,
    device="cpu",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("".join(f"{n} plus {n} is {n + n}.\n" for n in range(800)))
    return str(file)


def run_in_pool(rank: int, size: int, out: str) -> None:
    folder = RunFolder(Path(out))
    run_rank(folder.config(), folder)


def started(procs: Pool, size: int, config: TrainConfig) -> tuple[RunFolder, list[Outcome]]:
    """What `paceline train` does, with ranks from the pool."""
    folder = RunFolder.prepare(replace(config, ranks=size))
    folder.release()
    return folder, procs(size).attempt(run_in_pool, str(folder.path))


def trained(procs: Pool, size: int, config: TrainConfig) -> tuple[str, list[Any]]:
    """The digest, and every loss that was written."""
    folder, outcomes = started(procs, size, config)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert (folder.result()["ranks"], folder.result()["lanes"]) == (size, config.lanes)
    return folder.result()["digest"], [(m["step"], m.get("loss"), m.get("held_out")) for m in folder.metrics()]


@pytest.mark.timeout(120)
def test_every_world_and_every_resume_gives_the_same_bits(procs: Pool, text: str, tmp_path: Path) -> None:
    config = replace(CONFIG, data=text)
    found = {
        (size, transport): trained(
            procs, size, replace(config, transport=transport, out=str(tmp_path / f"{size}{transport}"))
        )
        for size, transport in ((1, "auto"), (2, "shm"), (3, "shm"), (2, "torch"))
    }
    found[2, "audited"] = trained(procs, 2, replace(config, audit_every=2, out=str(tmp_path / "audited")))
    half = replace(config, out=str(tmp_path / "resumed"))
    assert len(trained(procs, 2, replace(half, steps=3))[1]) == 4  # three steps and an evaluation
    found[3, "resumed"] = trained(procs, 3, half)
    alone = found[1, "auto"]
    assert [step for step, loss, _ in alone[1] if loss is not None] == [1, 2, 3, 4, 5, 6]
    assert all(run == alone for run in found.values()), found


@pytest.mark.timeout(120)
def test_placements_give_the_same_bits(procs: Pool, text: str, tmp_path: Path) -> None:
    config = replace(CONFIG, data=text, width=128, save_every=2, clip=0.5)  # every step clips

    def run(size: int, placement: str, **how: Any) -> tuple[str, list[Any]]:
        out = str(tmp_path / f"{size}{placement}{len(how)}")
        return trained(procs, size, replace(config, placement=placement, out=out, **how))

    alone = run(1, "ddp")
    pairs = [(1, "zero1"), (2, "ddp"), (2, "zero1"), (2, "zero2"), (2, "zero3"), (3, "zero1"), (3, "zero2")]
    for size, placement in pairs:
        assert run(size, placement) == alone, (size, placement)
    assert run(4, "zero2", shard=2) == alone
    assert run(4, "zero1", copies=2, transport="auto") == alone
    assert run(2, "zero1", transport="torch", shard=2) == alone


def poison(rank: int, size: int, out: str) -> None:
    """Save a checkpoint whose gradients cannot be finite."""
    folder = RunFolder(Path(out))
    config = folder.config()
    run = build_run(config, folder, paceline.init(device="cpu"), prepare(config, folder.path))
    resume(run, fresh=True)
    with torch.no_grad():
        run.net.norm.weight[0] = float("nan")
    run.resumed_at += 1
    save(run)
    run.checkpoints.wait()


@pytest.mark.timeout(120)
def test_gradients_that_stay_not_finite_end_the_run_after_a_checkpoint(procs: Pool, text: str, tmp_path: Path) -> None:
    config = replace(CONFIG, data=text, out=str(tmp_path / "run"), steps=40, eval_every=0)
    trained(procs, 2, replace(config, steps=1))
    procs(2).run(poison, config.out)
    folder, outcomes = started(procs, 2, config)
    for outcome in outcomes:
        assert isinstance(outcome.error, NotFiniteGradients), outcome
        assert "in each of the last 10 steps" in str(outcome.error) and "Step 11 is saved in" in str(outcome.error)
        assert code_of(outcome.error) == NOT_FINITE_EXIT
    assert (folder.checkpoints / "step-00000011").is_dir()
    assert len(list(folder.capsules.glob("*not-finite*"))) == 8, "of ten"
    assert [line["loss"] for line in folder.metrics() if line["step"] > 2] == [None] * 9


def begun(rank: int, size: int, out: str, fresh: bool) -> int | None:
    """At which step a rank of this run begins."""
    folder = RunFolder(Path(out))
    config = folder.config()
    found = resume(build_run(config, folder, paceline.init(device="cpu"), prepare(config, folder.path)), fresh=fresh)
    paceline.shutdown()
    return found


@pytest.mark.timeout(120)
def test_resume_says_where_a_run_begins_and_later_it_goes_on_from_what_it_has_saved(
    procs: Pool, text: str, tmp_path: Path
) -> None:
    """As when all ranks of an elastic job were lost: nothing tells them that the run is not new but the generation."""
    start = replace(CONFIG, data=text, out=str(tmp_path / "start"), eval_every=0)
    trained(procs, 1, replace(start, steps=1))

    def steps(run: str, asked: str) -> list[int | None]:
        folder = RunFolder(tmp_path / run)
        folder.config_file.write_text(to_toml(replace(folder.config(), resume=asked)))
        return [procs(1).run(begun, str(folder.path), fresh)[0] for fresh in (True, False)]

    trained(procs, 1, replace(start, steps=2, out=str(tmp_path / "own")))
    RunFolder.prepare(replace(start, out=str(tmp_path / "unsaved"))).release()
    assert steps("own", str(tmp_path / "start")) == [1, 2]
    assert steps("unsaved", str(tmp_path / "start")) == [1, 1]
    assert steps("own", "never") == [None, 2]
    assert steps("unsaved", "never") == [None, None]
