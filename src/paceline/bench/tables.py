"""Tables of text, for terminals, logs and documents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.contenders import short_label
from paceline.bench.results import BenchReport, TimedResult
from paceline.bench.statistics import Ratio
from paceline.memory_plan.table import aligned

NOTHING = "–"
Columns = Mapping[str, Callable[[Any], str]]  # by header: the cell of a row


@dataclass(frozen=True, slots=True)
class Table:
    """A title, rows under a header, and notes below. The first column is a name, the others are figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def render(table: Table) -> str:
    """The table as plain text."""
    text = [table.title, "", *aligned([table.header, None, *table.rows])]
    return "\n".join([*text, *(["", *table.notes] if table.notes else [])])


def report_table(
    report: BenchReport,
    title: str,
    columns: Columns | Sequence[str],
    rows: Iterable[Any],
    notes: Iterable[str] = (),
    legend: Mapping[str, str] | None = None,
) -> list[Table]:
    """The table of a report: rows of values with columns that show them, or rows of cells under a header."""
    explained = dict(legend or {})
    if "(90 %)" in columns:
        explained["(90 %)"] = "the 90 % interval of the ratio, from resampling whole rounds"
    width = max(map(len, explained), default=0)
    lines = [f"  {name.ljust(width)}  {text}" for name, text in explained.items()]
    if isinstance(columns, Mapping):
        rows = [[cell(row) for cell in columns.values()] for row in rows]
    return [Table(title, list(columns), list(rows), [*notes, *lines, where(report)])]


def where(report: BenchReport) -> str:
    """Hardware, versions and date, as a note."""
    found = report.circumstances
    machine = f"{found.hardware['cpu']}, {found.hardware['cores']} cores"
    machine += f", {found.hardware['memory_bytes'] / 2**30:.0f} GiB"
    if found.hardware.get("gpu"):
        machine += f", {found.hardware['gpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"{machine}; {versions}; {found.date}"


def setup_of(spec: Mapping[str, Any]) -> str:
    """What was trained, for a title."""
    return f"{spec['model']}, microbatch of {spec['micro_batch']} on {spec['device']}"


def failure_notes(results: Iterable[TimedResult]) -> list[str]:
    notes = []
    for result in results:
        if result.state != "ok":
            notes.append(f"{short_label(result.label)}: {result.state}: {result.message}")
            notes += [f"    | {line}" for line in result.log.splitlines()]
    return notes


# ---- cells


def show_ms(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1e3:.1f}" if abs(seconds) >= 0.01 else f"{seconds * 1e3:.2f}"


def show(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def show_ratio(ratio: Ratio | None) -> str:
    return show(ratio.value if ratio else None, ".3f")


def show_interval(ratio: Ratio | None, digits: int = 2) -> str:
    return f"{ratio.low:.{digits}f}–{ratio.high:.{digits}f}" if ratio else NOTHING


def ratio_columns(header: str, field: str, digits: int = 2) -> Columns:
    """Two columns for a ratio, which is a field of the rows: its value and its interval."""
    return {
        header: lambda row: show_ratio(getattr(row, field)),
        "(90 %)": lambda row: show_interval(getattr(row, field), digits),
    }


def show_agreement(result: TimedResult, replicas_equal: bool | None = None) -> str:
    if result.agrees is None or result.loss_difference is None:
        return NOTHING
    if not result.agrees:
        return "NO (replicas differ)" if replicas_equal is False else f"NO ({result.loss_difference:.0e})"
    return "yes" if result.loss_difference == 0 else f"to {result.loss_difference:.0e}"


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"
