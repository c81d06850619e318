"""`python -m paceline.bench step --model gpt-5m`: needs the standard library and torch only."""

import argparse
import sys

from paceline.bench.command import add_options, run_plain
from paceline.bench.commands import COMMANDS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench")
    kinds = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        add_options(kinds.add_parser(command.name, help=command.about, description=command.about), command)
    options = vars(parser.parse_args(arguments))
    return run_plain(COMMANDS[options.pop("command")], options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
