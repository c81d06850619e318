"""`paceline doctor --determinism SCRIPT …`: runs a script twice and reports what it computed differently."""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.cli.run_flags import parse
from paceline.cli.run_job import job_from
from paceline.errors import PacelineError, UsageError
from paceline.launch import Job, Listener, supervise
from paceline.rank_report import RECORD_NAME, RECORD_STEPS_NAME
from paceline.replica.recording_diff import Line, compare
from paceline.typed_json import read_json

_LINE: Any = dict[str, Any]
UNKNOWN = 2  # the exit status if the runs cannot be compared


def main(arguments: Sequence[str], steps: int) -> int:
    """Compare two runs of a script, which is given with its arguments as for `paceline run`."""
    try:
        job, script = _job(arguments, steps)
        first, second = (_record(job, number) for number in (1, 2))
    except PacelineError as error:
        sys.stderr.write(f"paceline doctor: {error}\n")
        return UNKNOWN
    except KeyboardInterrupt:
        return 130
    status, lines = compare(first, second, Path(script).name)
    sys.stdout.write("\n".join(lines) + "\n")
    return status


@dataclass
class LastLines(Listener):
    """Keeps the last lines that the script wrote."""

    lines: list[str] = field(default_factory=list)

    def line(self, rank: int, text: str) -> None:
        self.lines = [*self.lines[-9:], text]


def _job(arguments: Sequence[str], steps: int) -> tuple[Job, str]:
    """The job, and its script."""
    if not arguments:
        raise UsageError("--determinism needs a script: paceline doctor --determinism train.py --its --arguments")
    flags = parse(arguments)
    if flags.nproc_per_node not in (None, "1"):
        raise UsageError(f"--determinism looks at one rank; expected no -n, got -n {flags.nproc_per_node}")
    flags.nproc_per_node = "1"
    return replace(job_from(flags, os.environ), environment={RECORD_STEPS_NAME: str(steps)}), str(flags.script)


def _record(job: Job, number: int) -> list[Line]:
    """What one run computed."""
    sys.stderr.write(f"run {number} of 2 …\n")
    output = LastLines()
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        file = Path(folder) / "record"
        environment = {**job.environment, RECORD_NAME: str(file)}
        outcome = supervise(replace(job, run_dir=Path(folder), environment=environment), output)
        found = file.read_bytes() if file.exists() else b""
    if outcome.exit_code and outcome.signal:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise UsageError("the script failed, so its runs cannot be compared: " + "\n".join(outcome.failure.lines()))
    lines = [read_json(_LINE, line, "what a replica has computed") for line in found.splitlines()]
    if not lines:
        last = "".join(f"\n    | {line}" for line in output.lines)
        raise UsageError(
            "the script ended without a replica: expected one that wraps its model in "
            f"paceline.DistributedDataParallel and trains it. Its last lines:{last or ' none'}"
        )
    if not any(line["kind"] == "output" for line in lines):
        raise UsageError("the script made a replica but never called it: expected a training loop of at least one step")
    return lines
