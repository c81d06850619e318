"""`paceline bench`, and `python -m paceline.bench`, which needs the standard library and torch only."""

import argparse
import sys

from paceline.bench.command import add_options, run_plain
from paceline.bench.commands import COMMANDS

ABOUT = "Compare paceline with its peers, interleaved in one run. Without a command: `step`, in about a minute."


def main(arguments: list[str], program: str = "paceline bench") -> int:
    parser = argparse.ArgumentParser(program, description=ABOUT)
    kinds = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        add_options(kinds.add_parser(command.name, help=command.about, description=command.about), command)
    options = vars(parser.parse_args(arguments or ["step"]))
    return run_plain(COMMANDS[options.pop("command")], options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m paceline.bench"))
