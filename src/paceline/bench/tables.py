"""Reports as tables of text, for terminals, logs and documents."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.figures import Ratio
from paceline.bench.report import AllReduceReport, Circumstances, ContenderResult, StepReport
from paceline.bench.spec import show_count, show_ranks
from paceline.memory_plan.numbers import show_bytes

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """A title, rows under a header, and notes below. The first column is a name, the others are figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def render(table: Table) -> str:
    """As plain text."""
    lines = [list(table.header), *(list(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    text = [table.title, ""]
    for number, line in enumerate(lines):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
        if number == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join([*text, *(["", *table.notes] if table.notes else [])])


def step_tables(report: StepReport) -> list[Table]:
    spec = report.spec
    title = f"{spec['model']}, {show_count(report.parameters)} parameters, {show_ranks(spec['ranks'])} on "
    title += f"{spec['device']}, micro-batch {spec['micro_batch']}"
    if spec["accumulate"] > 1:
        title += f" × {spec['accumulate']}"
    title += f", {spec['threads']} thread{'s' if spec['threads'] > 1 else ''} a rank, {spec['steps']} steps"
    header = (
        "contender",
        "step ms",
        "p10–p90",
        "× torch",
        "(90 %)",
        "× floor",
        "above floor ms",
        "overlap",
        "sent",
        "peak B/param",
        "same loss",
    )
    rows = [_step_row(result) for result in report.contenders if result.state == "ok"]
    return [Table(title, header, rows, [*_step_notes(report), *where(report.circumstances)])]


def _step_row(result: ContenderResult) -> list[str]:
    assert result.median_s is not None and result.p10_s is not None and result.p90_s is not None
    return [
        result.label,
        show_ms(result.median_s),
        f"{show_ms(result.p10_s)}–{show_ms(result.p90_s)}",
        _ratio(result.to_torch),
        f"{result.to_torch.low:.2f}–{result.to_torch.high:.2f}" if result.to_torch else NOTHING,
        _ratio(result.to_floor),
        show_ms(result.above_floor_s),
        NOTHING if result.overlap is None else f"{result.overlap:.0%}",
        show_bytes(result.sent_bytes) if result.sent_bytes else NOTHING,
        NOTHING if result.peak_bytes_per_parameter is None else f"{result.peak_bytes_per_parameter:.1f}",
        _agreement(result),
    ]


def _agreement(result: ContenderResult) -> str:
    if result.agrees is None or result.loss_difference is None:
        return NOTHING
    if not result.agrees:
        return f"NO ({result.loss_difference:.0e})" if result.replicas_equal is not False else "NO (replicas differ)"
    return "yes" if result.loss_difference == 0 else f"to {result.loss_difference:.0e}"


def _step_notes(report: StepReport) -> list[str]:
    notes = []
    for result in report.contenders:
        if result.state != "ok":
            notes.append(f"{result.label}: {result.state}: {result.message}")
            notes += [f"    | {line}" for line in result.log.splitlines()]
            continue
        notes += [f"{result.label}: {note}" for note in result.notes]
        if result.phases_s and result.label.startswith("paceline"):
            phases = ", ".join(f"{name} {show_ms(seconds)}" for name, seconds in result.phases_s.items())
            count = len(result.bucket_bytes)
            buckets = f"; {count} bucket{'' if count == 1 else 's'}" if count else ""  # another checkout does not say
            notes.append(f"{result.label}: {phases} ms{buckets}")
        if result.predicted_exposed_s is not None:
            traced = "" if result.traced_exposed_s is None else f", by trace {show_ms(result.traced_exposed_s)}"
            notes.append(f"{result.label}: exposed by plan {show_ms(result.predicted_exposed_s)}{traced} ms")
    done = [result for result in report.contenders if result.state == "ok"]
    rounds = max((len(result.samples_s) for result in done), default=0)
    if rounds < len(done):
        notes.append(f"{rounds} rounds for {len(done)} contenders: not all have had every place; take more --steps")
    notes.append(
        "above floor: step − floor. exposed: communication while a rank could only wait. overlap: the part of "
        "communication that is not exposed, for paceline from its trace, else by the floor and the same all-reduces "
        "alone. sent: per rank and step, by the algorithm. peak: of training, above what was there before "
        "the model. (90 %): where the ratio lies in 9 of 10 resamplings of the rounds."
    )
    return notes


def allreduce_tables(report: AllReduceReport) -> list[Table]:
    labels = list(dict.fromkeys(row.label for row in report.rows))
    header = ["size", *(f"{label} ms" for label in labels), *(f"{label} GB/s" for label in labels)]
    rivals = [label for label in labels if label != "paceline"]
    if "paceline" in labels:
        header += [f"× {label}" for label in rivals]
    rows = []
    for nbytes in dict.fromkeys(row.nbytes for row in report.rows):
        found = {row.label: row for row in report.rows if row.nbytes == nbytes}
        cells = [show_bytes(nbytes)]
        cells += [f"{found[label].median_s * 1e3:.3f}" if label in found else NOTHING for label in labels]
        cells += [f"{found[label].bytes_per_s / 1e9:.2f}" if label in found else NOTHING for label in labels]
        if "paceline" in labels:
            ours = found["paceline"].speedup if "paceline" in found else {}
            cells += [f"{ours[label]:.2f}" if label in ours else NOTHING for label in rivals]
        rows.append(cells)
    notes = [f"{label}: {why}" for label, why in report.absent.items()]
    notes.append(f"paceline moved bytes through {report.transport}. GB/s is size / time; × is paceline's bandwidth.")
    title = f"all-reduce of one float32 tensor over {report.spec['ranks']} ranks"
    return [Table(title, header, rows, [*notes, *where(report.circumstances)])]


def where(circumstances: Circumstances) -> list[str]:
    """Hardware, versions and date, as a note."""
    hardware = circumstances.hardware
    place = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB"
    if hardware.get("gpu"):
        place += f", {hardware['gpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in circumstances.versions.items())
    return [f"{place}; {versions}; {circumstances.date}"]


def show_ms(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1e3:.1f}" if abs(seconds) >= 0.01 else f"{seconds * 1e3:.2f}"


def _ratio(ratio: Ratio | None) -> str:
    return NOTHING if ratio is None else f"{ratio.value:.3f}"
