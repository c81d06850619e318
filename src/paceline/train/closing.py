"""The end of a run: the last evaluation, the result, the picture and the report."""

import os
import platform
import time
from dataclasses import asdict
from statistics import median_high

import torch

import paceline
from paceline.process_status import cpu_model
from paceline.rank_report import report
from paceline.train.evaluate import held_out_loss, write_sample
from paceline.train.run_report import write_picture, write_report
from paceline.train.run_state import Run
from paceline.train.sizes import Shape

MEASURED = (
    *("tokens_per_second", "mfu", "step_seconds", "exposed_seconds", "overlap"),
    *("gradient_difference", "memory_planned", "memory_measured"),
)

# Dense bfloat16 operations per second, from the makers' data sheets; the first matching name is used.
PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "4090": 165e12,
    "3090": 71e12,
    "L4": 121e12,
}


def close_run(run: Run, ended: str, seconds: float) -> None:
    """All ranks call it; rank 0 writes the files. A run that was asked to stop has little time, so it skips the
    evaluation."""
    finished = ended == "finished"
    held_out = None
    if finished:
        held_out = held_out_loss(run)
        if not any("held_out" in line and line["step"] == run.step for line in run.folder.metrics()):
            run.metrics.held_out(run.step, held_out, held_out / run.text.bytes_per_token)
    digest = paceline.digest(run.net, run.optimizer, run.step, asdict(run.loader.cursor))
    sample = write_sample(run) if finished and run.config.sample else ""
    if finished:
        with run.model.whole():
            if run.world.rank == 0:
                paceline.export_weights(run.net, run.folder.weights_file)
    if run.world.rank != 0:
        return
    run.folder.write_result(
        kept(run) | result_of(run, held_out) | {"ended": ended, "seconds": seconds, "digest": digest, "sample": sample}
    )
    if finished:
        write_picture(run.folder)
        write_report(run.folder)
    report("result", digest=digest, ended=ended, step=run.step)


def kept(run: Run) -> dict[str, object]:
    """Measurements of an earlier attempt, for an attempt that had no step left to measure."""
    before = run.folder.result() if run.folder.result_file.exists() and not run.metrics.seconds else {}
    return {name: before.get(name) for name in MEASURED}


def result_of(run: Run, held_out: float | None) -> dict[str, object]:
    """The contents of result.json, except for how the run ended."""
    metrics, config = run.metrics, run.config
    step_s = _median(metrics.seconds[1:] or metrics.seconds)  # the first one warms up
    tokens = config.samples_of_step(run.world.size) * config.shape.context
    speed = tokens / step_s if step_s else None
    parameters = sum(param.numel() for param in run.net.parameters())
    losses = [line["loss"] for line in run.folder.metrics() if "loss" in line]
    found = {
        "steps": run.step,
        "own_steps": len(metrics.seconds),  # of this attempt
        "ranks": run.world.size,
        "lanes": config.lanes,
        "placement": config.placement,
        "shard": config.shard_size(run.world.size),
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
        "exposed_seconds": _median(metrics.exposed),
        "overlap": _median(metrics.overlaps),
        "checkpoint_blocked_seconds": sum(metrics.blocked),
        "gradient_difference": run.checks.difference,
        "memory_planned": run.checks.planned,
        "memory_measured": run.checks.measured,
        "resumed_from": run.resumed_from,
        "redone_steps": run.redone,
        "source": run.text.source,
    }
    return {name: value for name, value in found.items() if value is not None or name not in MEASURED}


def _median(values: list[float]) -> float | None:
    return median_high(values) if values else None


def operations_per_token(parameters: int, shape: Shape) -> int:
    """Of forward and backward: 6 for every parameter, and those of attention over half the context."""
    return 6 * parameters + 6 * shape.layers * shape.width * shape.context


def utilisation(
    tokens_per_second: float | None, parameters: int, shape: Shape, device: torch.device, ranks: int
) -> float | None:
    """The part of the peak that the model's own operations took. None where the peak is not known."""
    if tokens_per_second is None or device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAK.items() if known in name), None)
    return None if peak is None else tokens_per_second * operations_per_token(parameters, shape) / (peak * ranks)


def origin(device: torch.device) -> dict[str, str]:
    """For result.json and the report: date, machine and versions, each as a line of text."""
    found = {"paceline": paceline.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": ", ".join((cpu_model(), f"{len(os.sched_getaffinity(0))} cores", *gpus(device))),
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
    }


def gpus(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    return [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"]
