"""`paceline run`. It needs neither torch nor typer."""

import os
from collections.abc import Sequence

from paceline.cli.engines import engine_for
from paceline.cli.run_flags import notes, parse
from paceline.cli.run_job import hidden, job_from, missing_gpus
from paceline.cli.run_output import RunOutput
from paceline.launch import supervise


def main(argv: Sequence[str]) -> int:
    """Run what the command line says; return the exit code."""
    flags = parse(argv)
    job = job_from(flags, os.environ)
    output = RunOutput(job, hidden(flags, job.slots))
    for text in (*notes(flags), *missing_gpus(job)):
        output.note(text)
    try:
        with engine_for(flags, job, output.note) as engine:
            outcome = supervise(job, output, engine)
    finally:
        output.close()
    output.conclude(job, outcome)
    return outcome.exit_code
