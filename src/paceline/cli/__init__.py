"""The command `paceline`."""

import os
import sys
from importlib import import_module

from paceline.errors import PacelineError, UsageError

INTERRUPT_EXIT = 130
# Commands that need neither typer nor rich. What follows a script, for one, belongs to the script.
PLAIN = {"run": "paceline.cli.run_command", "doctor": "paceline.cli.doctor", "bench": "paceline.bench.__main__"}


def main() -> None:
    """Entry point. It loads no torch: workers do, when there is something to run."""
    try:
        _open_closed_streams()
        _dispatch()
    except KeyboardInterrupt:  # also while modules are still being imported
        sys.exit(INTERRUPT_EXIT)
    except PacelineError as error:
        sys.stderr.write(f"paceline {sys.argv[1]}: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed, as `>&-` does: the next file opened would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _dispatch() -> None:
    if sys.argv[1:] and (module := PLAIN.get(sys.argv[1])):
        sys.exit(import_module(module).main(sys.argv[2:]))
    try:
        import rich  # noqa: F401 (typer asks for it only when it prints)

        from paceline.cli.app import build_app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"paceline: the command line needs {error.name}, which is not installed: pip install 'paceline[cli]'")
    build_app()()
