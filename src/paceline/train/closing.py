"""The end of a run: the last evaluation, the result, the picture and the report."""

from dataclasses import asdict

import paceline
from paceline.tell import tell
from paceline.train.evaluate import held_out_loss, write_sample
from paceline.train.origin import origin
from paceline.train.report import write_picture, write_report
from paceline.train.run import Run
from paceline.train.speed import utilisation

MEASURED = (
    *("tokens_per_second", "mfu", "step_seconds", "exposed_seconds", "overlap"),
    *("gradient_difference", "memory_planned", "memory_measured"),
)


def close_run(run: Run, ended: str, seconds: float) -> None:
    """All ranks call it; rank 0 writes the files. One that was asked to stop has little time: it evaluates nothing."""
    finished = ended == "finished"
    held_out = None
    if finished:
        held_out = held_out_loss(run)
        if not any("held_out" in line and line["step"] == run.step for line in run.folder.metrics()):
            run.record.held_out(run.step, held_out, held_out / run.text.bytes_per_token)
    digest = paceline.digest(run.net, run.optimizer, run.step, asdict(run.loader.cursor))
    if run.world.rank != 0:
        return
    if finished:
        paceline.export_weights(run.net, run.folder.weights_file)
    sample = write_sample(run) if finished and run.config.sample else ""
    run.folder.write_result(
        kept(run) | result_of(run, held_out) | {"ended": ended, "seconds": seconds, "digest": digest, "sample": sample}
    )
    if finished:
        write_picture(run.folder)
        write_report(run.folder)
    tell("result", digest=digest, ended=ended, step=run.step)


def kept(run: Run) -> dict[str, object]:
    """What an earlier attempt has measured, for one that had no step left to measure it."""
    before = run.folder.result() if run.folder.result_file.exists() and not run.record.seconds else {}
    return {name: before.get(name) for name in MEASURED}


def result_of(run: Run, held_out: float | None) -> dict[str, object]:
    """What result.json says, but for how it ended."""
    record, config = run.record, run.config
    step_s = _median(record.seconds[1:] or record.seconds)  # the first one warms up
    tokens = config.samples_of_step(run.world.size) * config.shape.context
    speed = tokens / step_s if step_s else None
    parameters = sum(param.numel() for param in run.net.parameters())
    losses = [line["loss"] for line in run.folder.metrics() if "loss" in line]
    found = {
        "steps": run.step,
        "own_steps": len(record.seconds),  # of this attempt
        "ranks": run.world.size,
        "lanes": config.lanes,
        "device": str(run.device),
        **origin(run.device),
        "final_loss": losses[-1] if losses else None,
        "held_out_loss": held_out,
        "held_out_per_byte": None if held_out is None else held_out / run.text.bytes_per_token,
        "parameters": parameters,
        "tokens_per_second": speed,
        "tokens_per_step": tokens,
        "mfu": utilisation(speed, parameters, config.shape, run.device, run.world.size),
        "step_seconds": step_s,
        "exposed_seconds": _median(record.exposed),
        "overlap": _median(record.overlaps),
        "checkpoint_blocked_seconds": sum(record.blocked),
        "gradient_difference": run.checks.difference,
        "memory_planned": run.checks.planned,
        "memory_measured": run.checks.measured,
        "resumed_from": run.resumed_from,
        "redone_steps": run.redone,
        "source": run.text.source,
    }
    return {name: value for name, value in found.items() if value is not None or name not in MEASURED}


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
