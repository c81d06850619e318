"""One measurement as a command, how it is run, and its command line where nothing but Python and torch is installed."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from paceline.bench.conductor import Log
from paceline.bench.results import write_json
from paceline.bench.tables import Table, render
from paceline.errors import PacelineError
from paceline.memory_plan.plan_chart import require_outputs

FILES = {
    "json": "write the report, with every sample, to this file",
    "png": "draw a chart into this file (needs matplotlib)",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One measurement."""

    name: str
    about: str
    spec: type[Any]  # a dataclass; its fields are the options
    run: Callable[[Any, Log], Any]  # measures, and returns the report
    tables: Callable[[Any], list[Table]]
    chart: Callable[[dict[str, Any]], Any]  # a figure of a report, as JSON holds it


def conduct(
    command: Command, settings: dict[str, Any], log: Log, json_file: Path | None = None, png_file: Path | None = None
) -> Any:
    """Run `command`, write the requested files, and return the report."""
    spec = command.spec(**settings)
    require_outputs(json_file, png_file)
    report = command.run(spec, log)
    if json_file is not None:
        write_json(report, json_file)
        log(f"wrote {json_file}")
    if png_file is not None:
        command.chart(asdict(report)).savefig(png_file)
        log(f"wrote {png_file}")
    return report


def exit_code(report: Any) -> int:
    """1 if a contender failed, or if its results differ from the others'."""
    points = [point[-1] if isinstance(point, tuple) else point for point in getattr(report, "points", [report])]
    results = [result for point in points for result in getattr(point, "contenders", [])]
    return int(any(result.state == "failed" or result.agrees is False for result in results))


# ---- the plain command line


def run_script(command: Command, arguments: list[str]) -> int:
    """The command line of a script that is one measurement."""
    parser = argparse.ArgumentParser(description=command.about)
    add_options(parser, command)
    return run_plain(command, vars(parser.parse_args(arguments)))


class NamesWhole(argparse.HelpFormatter):
    """Does not break lines inside names."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)


def add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    parser.formatter_class = NamesWhole
    for item in fields(command.spec):
        default: Any = item.default
        kind: Any = type(default)
        takes: dict[str, Any] = {"action": "store_true"}
        about = item.metadata["about"]
        if kind is not bool:
            takes = {"type": split_names if kind is tuple else kind, "default": default}
            about += f" (default: {','.join(default) if kind is tuple else default})"
        parser.add_argument(f"--{item.name.replace('_', '-')}", help=about.replace("%", "%%"), **takes)
    for name, about in FILES.items():
        parser.add_argument(f"--{name}", type=Path, help=about)


def split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def run_plain(command: Command, options: dict[str, Any]) -> int:
    json_file, png_file = (options.pop(name) for name in FILES)
    try:
        report = conduct(command, options, _log, json_file, png_file)
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    for table in command.tables(report):
        sys.stdout.write(render(table) + "\n\n")
    return exit_code(report)


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
