"""Lanes have equal weight, so their microbatches must be equally large, unless weight() sets their weights.

Ranks exchange a digest of the shapes of their microbatches, as passed to model.lanes(). Only if the digests differ,
or the lanes of one rank do, the shapes themselves are exchanged, so that every rank can name them.
"""

from collections.abc import Sequence

from paceline.blocks import listed
from paceline.collectives.gather import gather_bytes
from paceline.collectives.group import Group
from paceline.errors import UsageError
from paceline.reducer.lanes import Lanes, Shapes
from paceline.reducer.report import StepReport

NONE, DIFFERENT = 0, -1  # no hash is -1
MAX_DESCRIPTION_BYTES = 512


def shape_digest(lanes: Lanes) -> int:
    """A digest of the shape that all microbatches of this rank have had in this step, if they had one."""
    found = set(lanes.shapes.values())
    if not found:
        return NONE
    return DIFFERENT if len(found) > 1 else hash(found.pop())


def check(rows: Sequence[StepReport], lanes: Lanes, group: Group) -> None:
    """All ranks call it, with the same reports, and all raise or none does."""
    found = {row.lane_shape for row in rows} - {NONE}
    if len(found) < 2 and DIFFERENT not in found:
        return
    payloads = gather_bytes(
        group, _describe_shapes(lanes).encode()[:MAX_DESCRIPTION_BYTES], "the shapes of microbatches"
    )
    texts = [payload.decode(errors="replace") for payload in payloads]
    by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    raise UsageError(
        f"the microbatches of step {lanes.step} have different shapes ({by_rank}): lanes have "
        f"equal weight, so some samples would count too much or too little. Use a loader with drop_last=True, or run "
        f"each backward inside model.weight(number of samples)"
    )


def _describe_shapes(lanes: Lanes) -> str:
    """The shapes of this rank's microbatches, grouped by lanes of equal shape."""
    runs: list[tuple[range, Shapes]] = []
    for lane, shapes in sorted(lanes.shapes.items()):
        if runs and runs[-1] == (range(runs[-1][0].start, lane), shapes):
            runs[-1] = range(runs[-1][0].start, lane + 1), shapes
        else:
            runs.append((range(lane, lane + 1), shapes))
    return ", ".join(f"{listed(run)} {shown(shapes)}" for run, shapes in runs)


def shown(shapes: Shapes) -> str:
    return " and ".join(str(list(shape)) for shape in shapes) or "no tensor"
