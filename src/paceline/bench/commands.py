"""The measurements by name: what both command lines, `paceline bench` and `python -m paceline.bench`, offer."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.spec import (
    AccumulateSpec,
    AgreementSpec,
    AllReduceSpec,
    CostModelSpec,
    HooksSpec,
    LanesSpec,
    MachinerySpec,
    RanksSpec,
    StepSpec,
)
from paceline.memory_plan.files import require_picture, require_place

if TYPE_CHECKING:
    from paceline.bench.tables import Table

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """One measurement. Its code is named, not imported: help texts need the options alone."""

    name: str
    about: str
    spec: type[Any]  # a dataclass; its fields are the options
    runner: str  # "module:function" under paceline.bench
    tabler: str

    def run(self, spec: Any, say: Say) -> Any:
        """The report."""
        return _find(self.runner)(spec, say)

    def tables(self, report: Any) -> "list[Table]":
        found: list[Table] = _find(self.tabler)(report)
        return found


COMMANDS = (
    Command("step", "The same training step under each contender.", StepSpec, "steps:run_steps", "tables:step_tables"),
    Command(
        "allreduce", "All-reduce alone, by size.", AllReduceSpec, "allreduce:run_allreduce", "tables:allreduce_tables"
    ),
    Command(
        "accumulate",
        "Training steps by the number of micros.",
        AccumulateSpec,
        "series:run_series",
        "study_tables:series_tables",
    ),
    Command(
        "ranks", "Training steps by the number of ranks.", RanksSpec, "series:run_series", "study_tables:series_tables"
    ),
    Command(
        "lanes", "What lanes cost beside the plain mode.", LanesSpec, "own_study:run_lanes", "study_tables:lanes_tables"
    ),
    Command(
        "agreement",
        "What checks between replicas cost.",
        AgreementSpec,
        "own_study:run_agreement",
        "study_tables:agreement_tables",
    ),
    Command(
        "hooks", "What the reducer costs per parameter.", HooksSpec, "hooks:run_hooks", "study_tables:hooks_tables"
    ),
    Command(
        "machinery",
        "What one rank adds to the bare model when the network costs nothing.",
        MachinerySpec,
        "machinery:run_machinery",
        "study_tables:machinery_tables",
    ),
    Command(
        "cost-model",
        "A model of all-reduce up to 10,000 ranks, fitted and checked here.",
        CostModelSpec,
        "cost_study:run_cost_model",
        "study_tables:cost_tables",
    ),
)


def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"paceline.bench.{module}"), function)
    return found


def conduct(
    command: Command, settings: dict[str, Any], say: Say, json_file: Path | None = None, png_file: Path | None = None
) -> Any:
    """Run `command`, write the files that were asked for, and return the report."""
    from paceline.bench.report import write_json

    spec = command.spec(**settings)
    # Before minutes are spent.
    if json_file is not None:
        require_place("json", json_file)
    if png_file is not None:
        require_picture("png", png_file)
    report = command.run(spec, say)
    if json_file is not None:
        write_json(report, json_file)
        say(f"wrote {json_file}")
    if png_file is not None:
        from paceline.bench.chart import draw

        draw(asdict(report), png_file)
        say(f"wrote {png_file}")
    return report


def exit_code(report: Any) -> int:
    """1 when a contender failed, or computed something else than the others."""
    points = [point[-1] if isinstance(point, tuple) else point for point in getattr(report, "points", [report])]
    results = [result for point in points for result in getattr(point, "contenders", [])]
    return int(any(result.state == "failed" or result.agrees is False for result in results))
