"""The objects of a rank while it trains, those that go into a checkpoint, and how a run resumes from one."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import paceline
from paceline.checkpoint.outcome import Loaded
from paceline.errors import ReplicaDrift, UsageError
from paceline.rank_report import report
from paceline.train.checks import Checks
from paceline.train.config import TrainConfig
from paceline.train.metrics import RunMetrics
from paceline.train.model import GPT
from paceline.train.optimizer import jump_at
from paceline.train.run_folder import RunFolder
from paceline.train.samples import Text
from paceline.world.environment import Variables


@dataclass
class Run:
    """One rank of one run. Fields with defaults are reassigned; the others only change inside."""

    config: TrainConfig
    folder: RunFolder
    world: paceline.World
    text: Text
    net: GPT
    model: Any  # the net in paceline's class, compiled or not
    optimizer: torch.optim.Optimizer
    loader: "paceline.Loader[Any]"  # of microbatches, or with lanes of lists of them
    checkpoints: paceline.Checkpointer
    metrics: RunMetrics
    checks: Checks
    elastic: "paceline.Elastic | None" = None  # set last
    resumed_at: int = 0
    saved_at: int | None = None
    resumed_from: int | None = None
    redone: int = 0  # steps after the checkpoint that an earlier attempt had made

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self.resumed_at if self.elastic is None else self.elastic.step

    @property
    def device(self) -> torch.device:
        return self.world.device


def save(run: Run) -> None:
    """All ranks call it after the same step. Raises ReplicaDrift, and saves nothing, if their states differ."""
    try:
        saved = run.checkpoints.save(
            run.step,
            model=run.model,
            optimizer=run.optimizer,
            loader=run.loader,
            tokenizer=run.text.tokenizer.digest(),
        )
    except ReplicaDrift as error:
        if run.config.on_drift == "raise" or run.step == run.config.steps:
            raise
        report("trouble", text=f"step {run.step:5d}   checkpoint NOT saved: {error}")  # a later step heals it
        return
    run.saved_at = run.step
    run.metrics.blocked.append(saved.blocked_s)
    report("saved", step=run.step, blocked_s=saved.blocked_s, problem=str(saved.problem) if saved.problem else "")


def resume(run: Run, *, fresh: bool) -> int | None:
    """Load the newest checkpoint that ranks have compared, or the one that was asked for, if there is one. All ranks
    call it. Returns its step. `fresh`: no rank has trained yet in this attempt."""
    config, asked = run.config, run.config.resume
    # --resume applies to the start only. Ranks that join later continue from this run's own checkpoints, if any.
    again = not fresh or Variables(os.environ).integer("TORCHELASTIC_RESTART_COUNT", 0) > 0
    found = _load(run, "compared") if again or asked == "auto" else None
    if found is None and asked not in ("auto", "never"):
        found = _load(run, _checkpoints_in(Path(asked)))
    if found is None:
        if again or asked == "auto":
            _forget_after(run, 0)
        return None
    if found.more["tokenizer"] != run.text.tokenizer.digest():
        raise UsageError(
            f"the checkpoint of step {found.step} was made with another tokenizer than tokenizer={config.tokenizer!r} "
            f"makes now; resume with the tokenizer and the data of that run"
        )
    run.resumed_at = run.saved_at = run.resumed_from = found.step
    _forget_after(run, found.step)
    skipped = [str(one) for one in found.skipped]
    jump = jump_at(found.step, run.optimizer, config) if found.step < config.steps else None
    report("resumed", step=found.step, redone=run.redone, skipped=skipped, jump=jump)
    return found.step


def _load(run: Run, wanted: Path | Literal["compared"]) -> Loaded | None:
    """Load this checkpoint into the run; None if the run has saved none."""
    try:
        return run.checkpoints.load(wanted, model=run.model, optimizer=run.optimizer, loader=run.loader)
    except paceline.NoCheckpoint as error:
        if error.skipped or wanted != "compared":
            raise
        return None


def _checkpoints_in(path: Path) -> Path:
    """`path` is a checkpoint or a folder of them; the folder of a run has them in its `checkpoints`."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _forget_after(run: Run, step: int) -> None:
    """Drop metrics after `step`: repeated steps write them again."""
    if run.world.rank == 0:
        run.redone = run.folder.cut_metrics(step)
    paceline.barrier()
