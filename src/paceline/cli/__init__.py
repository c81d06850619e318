"""The command `paceline`."""

import sys


def main() -> None:
    """Entry point. It loads no torch: workers do, when there is something to run."""
    if sys.argv[1:2] == ["run"]:
        # By itself, because everything after the script belongs to the script; and it needs Python alone.
        from paceline.cli.run import main as run

        sys.exit(run(sys.argv[2:]))
    if sys.argv[1:2] == ["doctor"]:
        from paceline.cli.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    try:
        import rich  # noqa: F401 (typer asks for it only when it prints)

        from paceline.cli.app import build_app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"paceline: the command line needs {error.name}, which is not installed: pip install 'paceline[cli]'")
    build_app()()
