"""What of a run goes into a checkpoint, and how a run is taken up from one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import ReplicaDrift
from paceline.kernels import differences, kernel_settings
from paceline.tell import tell
from paceline.train.run import Run
from paceline.train.schedule import jump_at


def save(run: Run) -> None:
    """All ranks call it after the same step. Raises ReplicaDrift, and saves nothing, if their states differ."""
    try:
        saved = run.checkpoints.save(
            run.step,
            model=run.net,
            optimizer=run.optimizer,
            loader=run.loader,
            tokenizer=run.text.tokenizer.digest(),
            kernels=kernels_of(run),
        )
    except ReplicaDrift as error:
        if run.config.on_drift == "raise" or run.step == run.config.steps:
            raise
        tell("trouble", text=f"step {run.step:5d}   checkpoint NOT saved: {error}")  # it is healed in a later step
        return
    run.saved_at = run.step
    run.record.blocked.append(saved.blocked_s)
    tell("saved", step=run.step, blocked_s=saved.blocked_s, problem=str(saved.problem) if saved.problem else "")


def named(path: Path) -> Path:
    """A checkpoint, or a folder of them; the folder of a run has them in its `checkpoints`."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def resume(run: Run) -> None:
    """Take up the newest checkpoint that ranks have compared, or the one that was asked for, if there is one."""
    config = run.config
    # What --resume says is for the first attempt; a restart goes on from what this run has saved.
    wish = "auto" if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) else config.resume
    if wish == "never":
        return
    wanted = "compared" if wish == "auto" else named(Path(wish))
    try:
        found = run.checkpoints.load(wanted, model=run.net, optimizer=run.optimizer, loader=run.loader)
    except paceline.NoCheckpoint as error:
        if error.skipped or wish != "auto":
            raise
        forget_after(run, 0)
        return
    if found.more["tokenizer"] != run.text.tokenizer.digest():
        raise paceline.errors.UsageError(
            f"the checkpoint of step {found.step} was made with another tokenizer than tokenizer={config.tokenizer!r} "
            f"makes now; resume with the tokenizer and the data of that run"
        )
    run.step = run.saved_at = run.resumed_from = found.step
    forget_after(run, found.step)
    skipped = [str(one) for one in found.skipped]
    jump = jump_at(found.step, run.optimizer, config) if found.step < config.steps else None
    kernels = other_kernels(run, found.more)
    tell("resumed", step=found.step, redone=run.redone, skipped=skipped, jump=jump, kernels=kernels)


def kernels_of(run: Run) -> dict[str, str]:
    """What the last bits of a step depend on, beside what is trained."""
    return kernel_settings(run.device) | {"compile": str(run.config.compile)}


def other_kernels(run: Run, saved: Mapping[str, Any]) -> list[str]:
    """What is set otherwise than when the checkpoint was made, so that lanes would not give the same bits."""
    before = saved.get("kernels")
    return differences(before, kernels_of(run)) if before and run.config.lanes else []


def forget_after(run: Run, step: int) -> None:
    """Numbers of steps that are done again are written again."""
    if run.world.rank == 0:
        run.redone = run.folder.cut_metrics(step)
    paceline.barrier()
