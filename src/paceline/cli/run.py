"""`paceline run`. It needs neither torch nor typer."""

import argparse
import os
import sys
from collections.abc import Sequence

from paceline.cli.run_flags import Refused, notes, parse

USAGE_EXIT = 2
INTERRUPT_EXIT = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says; return the exit code."""
    try:
        flags = parse(sys.argv[1:] if argv is None else argv)
        return _run(flags)
    except Refused as error:
        return _refuse(str(error), USAGE_EXIT)
    except KeyboardInterrupt:
        return INTERRUPT_EXIT


def _run(flags: argparse.Namespace) -> int:
    # Only now: `--help` has answered before.
    from paceline.cli.run_job import hidden, job_from, shown
    from paceline.cli.screen import Screen
    from paceline.errors import PacelineError, UsageError
    from paceline.launch import supervise

    try:
        job = job_from(flags, os.environ)
        screen = Screen(job, shown=shown(flags, job.ranks), hidden=hidden(flags, job.ranks))
        for text in notes(flags):
            screen.note(text)
        try:
            outcome = supervise(job, screen)
        finally:
            screen.close()
    except UsageError as error:
        return _refuse(str(error), USAGE_EXIT)
    except PacelineError as error:
        return _refuse(str(error), 1)
    screen.conclude(job, outcome)
    return outcome.exit_code


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"paceline run: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
