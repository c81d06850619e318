"""`paceline doctor --determinism SCRIPT …`: runs a script twice and says what it computed differently."""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.cli.run_flags import Refused, parse
from paceline.cli.run_job import job_from
from paceline.errors import PacelineError, UsageError
from paceline.launch import Failure, Job, supervise
from paceline.tell import RECORD_NAME, RECORD_STEPS_NAME

SAME, DIFFERENT, UNKNOWN = 0, 1, 2
Line = dict[str, Any]


def main(words: Sequence[str], steps: int) -> int:
    """Compare two runs of what `words` say: a script and its arguments, as for `paceline run`."""
    try:
        job = _job(words, steps)
        first, second = (_record(job, number) for number in (1, 2))
    except (PacelineError, Refused) as error:
        sys.stderr.write(f"paceline doctor: {error}\n")
        return UNKNOWN
    except KeyboardInterrupt:
        return 130
    script = next(word for word in job.command[1:] if not word.startswith("-"))
    code, told = compare(first, second, Path(script).name)
    sys.stdout.write("\n".join(told) + "\n")
    return code


# ---- the two runs


@dataclass
class Ears:
    """Keeps the last lines that the script wrote."""

    lines: list[str] = field(default_factory=list)

    def line(self, rank: int, text: str) -> None:
        self.lines = [*self.lines[-9:], text]

    def told(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """What it tells is for other screens."""

    def restarting(self, attempt: int, failure: Failure) -> None:
        """It is not started again."""

    def tick(self) -> None:
        """There is nothing to draw."""


def _job(words: Sequence[str], steps: int) -> Job:
    if not words:
        raise UsageError("--determinism needs a script: paceline doctor --determinism train.py --its --arguments")
    flags = parse(words)
    if flags.nproc_per_node not in (None, "1"):
        raise UsageError(f"--determinism looks at one rank; expected no -n, got -n {flags.nproc_per_node}")
    flags.nproc_per_node = "1"
    return replace(job_from(flags, os.environ), environment={RECORD_STEPS_NAME: str(steps)})


def _record(job: Job, number: int) -> list[Line]:
    """What one run computed."""
    sys.stderr.write(f"run {number} of 2 …\n")
    ears = Ears()
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        file = Path(folder) / "record"
        environment = {**job.environment, RECORD_NAME: str(file)}
        outcome = supervise(replace(job, run_dir=Path(folder), environment=environment), ears)
        found = file.read_text(encoding="utf-8") if file.exists() else ""
    if outcome.exit_code and outcome.signal:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise UsageError("the script failed, so nothing can be said: " + "\n".join(outcome.failure.lines()))
    lines = [json.loads(line) for line in found.splitlines()]
    if not lines:
        last = "".join(f"\n    | {line}" for line in ears.lines)
        raise UsageError(
            "the script ended without a replica: expected one that wraps its model in "
            f"paceline.DistributedDataParallel and trains it. Its last lines:{last or ' none'}"
        )
    if not any(line["kind"] == "output" for line in lines):
        raise UsageError("the script made a replica but never called it: expected a training loop of a step or more")
    return lines


# ---- what they tell


def compare(first: Sequence[Line], second: Sequence[Line], script: str) -> tuple[int, list[str]]:
    """The exit code, and what to say, by the lines of two runs."""
    settings: dict[str, str] = next((line["settings"] for line in first if line["kind"] == "settings"), {})
    for ours, theirs in zip_longest(_computed(first), _computed(second)):
        if ours != theirs:
            first_step = next((line["step"] for line in first if "step" in line), 0)
            return DIFFERENT, [*_difference(ours, theirs, script, first_step), *_kernels(settings)]
    counts = Counter(line["kind"] for line in first)
    steps = len({(line["replica"], line["step"]) for line in first if "step" in line})
    lanes = next((line["lanes"] for line in first if line["kind"] == "replica"), None)
    where = f"the first {f'{steps} steps' if steps > 1 else 'step'}{f' of {lanes} lanes' if lanes else ''}"
    seen = f"{counts['output']} outputs of modules, {counts['gradient']} gradients, {counts['buffer after']} buffers"
    more = "only these were looked at; --steps N looks at more"
    return SAME, [f"{script} gives the same bits twice in {where}: {seen}", f"  {more}", *_kernels(settings)]


def _computed(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] not in ("complete", "settings")]


def _difference(ours: Line | None, theirs: Line | None, script: str, first_step: int) -> list[str]:
    if ours is None or theirs is None or {**ours, "word": 0} != {**theirs, "word": 0}:
        one, other = (_named(line) if line else "nothing more" for line in (ours, theirs))
        told = f"after the same bits the first went on with {one}, the second with {other}"
        advice = "look for an order of a set or of files, a clock, or random numbers without a seed"
        return [
            f"two runs of {script} DIFFER in what they compute: {told}",
            f"  Something decides anew in each run which modules are called, or how often: {advice}.",
        ]
    return [
        f"two runs of {script} DIFFER first in {_named(ours)}; all before it is equal",
        f"  {_advice(ours, first_step)}",
    ]


def _named(line: Line) -> str:
    if line["kind"] == "replica":
        return f"a replica of {line['name']}"
    what = line["name"] or "the model itself"
    kind = f" ({line['kind_of']})" if line["kind_of"] else ""
    where = f"step {line['step']}" + ("" if line["lane"] is None else f", lane {line['lane']}")
    told = {
        "weights": f"the weights of {what} at the begin",
        "buffer before": f"the buffer {what} at the begin",
        "buffer after": f"the buffer {what} after forward",
        "input": f"input {what}{kind}",
        "output": f"the output of {what}{kind}",
        "gradient": f"the gradient of {what}",
    }[line["kind"]]
    return f"{told}, {where}"


def _advice(line: Line, first_step: int) -> str:
    kind, first = line["kind"], line["step"] == first_step
    if kind in ("weights", "buffer before") and first:
        return "The model starts otherwise in each run: call torch.manual_seed(…) before it is built."
    if kind in ("weights", "buffer before"):
        return "All gradients were equal: the optimizer, or what runs between steps, draws numbers without a seed."
    if kind == "input":
        return "The data come otherwise in each run: seed the order and what is drawn when a sample is read."
    if kind == "gradient":
        return "Forward was equal: a kernel of backward is not deterministic; torch.use_deterministic_algorithms(True)."
    seed = (
        "Lanes seed the generators of torch, Python and NumPy; this module draws from a generator of its own"
        if line["lane"] is not None
        else "This module draws random numbers without a seed (lanes would seed them, else torch.manual_seed)"
    )
    return f"{seed}, or runs a kernel that is not deterministic (torch.use_deterministic_algorithms(True))."


def _kernels(settings: dict[str, str]) -> list[str]:
    shown = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return [f"kernels: {shown}"] if shown else []
