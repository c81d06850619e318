"""`python -m paceline.bench step --model gpt-5m`: needs the standard library and torch only."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.bench.commands import COMMANDS, conduct, exit_code
from paceline.bench.tables import render
from paceline.errors import PacelineError


def main(arguments: list[str]) -> int:
    options = vars(_parser().parse_args(arguments))
    name, json_file, png_file = (options.pop(key) for key in ("command", "json", "png"))
    command = next(command for command in COMMANDS if command.name == name)
    try:
        report = conduct(command, options, _say, json_file, png_file)
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    for table in command.tables(report):
        sys.stdout.write(render(table) + "\n\n")
    return exit_code(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench")
    kinds = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        sub = kinds.add_parser(command.name, help=command.about, description=command.about)
        for item in fields(command.spec):
            kind: Any = _names if isinstance(item.default, tuple) else type(item.default)
            takes: dict[str, Any] = (
                {"action": "store_true"} if kind is bool else {"type": kind, "default": item.default}
            )
            about = f"{item.metadata['about']} (default: {item.default})".replace("%", "%%")
            sub.add_argument(f"--{item.name.replace('_', '-')}", help=about, **takes)
        sub.add_argument("--json", type=Path, help="write the report, with every sample, to this file")
        sub.add_argument("--png", type=Path, help="draw a chart into this file")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
