"""Handling of reports that are read one reduction late, if collectives are ordered by streams.

They are read at the end of the next reduction, on every rank: so no host waits for work that its device has just
received, and all ranks decide alike. Values needed in the same step are taken from the reports on the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError
from paceline.reducer import report_errors
from paceline.reducer.buckets import BucketSet
from paceline.reducer.device_reports import MODE, WEIGHT
from paceline.reducer.report import Abort, Mode, PendingReports, StepReport, StepRole
from paceline.reducer.settle import Settled, check_together, is_aborted, uses_of
from paceline.reducer.step import Division

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


def settle_on_device(gathered: torch.Tensor, buckets: BucketSet, division: Division, lanes: int) -> None:
    """The same factor as in `settle`, from the reports on the device, without waiting.

    Whether there are weights depends on all ranks: one that has skipped its batch, or whose loss touched no parameter,
    has none. Weights are added lane by lane, each of which one rank has and all others have as zero: so the sum does
    not depend on the number of ranks.
    """
    columns = gathered.view(torch.float64)
    weighted = (gathered[:, MODE] == Mode.WEIGHTED.value).any()
    total = (columns[:, -lanes:].sum(0) if lanes else columns[:, WEIGHT]).sum()
    by_weight = float(division.size if division.by_reduction else 1)
    if lanes:
        factor = torch.where(total > 0, torch.where(weighted, by_weight, division.divisor) / total, 0.0)
    else:
        factor = torch.where(weighted, torch.where(total > 0, by_weight / total, 0.0), 1.0)
    for flat in buckets.results():
        if flat.dtype in (
            torch.float16,
            torch.bfloat16,
        ):  # their product would round the factor to their type
            flat.copy_(flat.float().mul_(factor.float()))
        else:
            flat.mul_(factor.to(flat.dtype))


def settle_unread(reducer: "Reducer", mine: PendingReports | None) -> Settled:
    """The reports of this reduction will be read at the end of the next one. Values needed now are taken from
    them on the device.

    Only a rank that did not use all of its parameters waits: whether any other rank has used them decides what their
    gradients are. `mine` is None in a step that a CUDA graph captures.
    """
    for call in reducer.callbacks.finished:
        call()
    settled = Settled()
    lanes = reducer.batch.weight_columns
    plain = reducer.weighting.mode is Mode.PLAIN and not lanes  # then no rank has weights
    if mine is not None and mine.on_device is not None and not plain:
        settle_on_device(mine.on_device, reducer.bucket_set, reducer.division(), lanes)
    if mine is not None and reducer.contribution.unused:
        reducer.wait(mine.work, f"which parameters the other ranks have used in reduction {mine.number}")
        # If unused parameters are an error, all ranks raise it together: one step later.
        settled = Settled(uses_of(mine.peek(), reducer.bucket_set, reducer.settings).uses)
    return replace(settled, aborted=reducer.contribution.role is StepRole.ABORTED)


def error_of_earlier(reducer: "Reducer", rows: Sequence[StepReport], found: PendingReports) -> Exception | None:
    """The reports of the previous reduction have arrived. Returns the error to raise, the same on every rank."""
    step = f"reduction {found.number}"
    try:
        check_together(rows)
        reducer.batch.check(rows)
    except PacelineError as mismatch:
        return mismatch
    if is_aborted(rows):
        own = rows[reducer.transport.rank].abort is not Abort.NO
        return report_errors.aborted_error(rows, _consequence(step, own=own, gated=found.gated))
    if any(row.late for row in rows):
        return report_errors.late_on_device(rows, step)
    if rows[0].mode is not Mode.WEIGHTED and not rows[0].lane_weights and any(row.skipped for row in rows):
        return report_errors.skipped_error(rows, step)
    error = None if reducer.schedule.observer is None else reducer.schedule.observer.decide(rows, None).error
    if any(row.graph_changed for row in rows):
        error = error or found.graph_error or report_errors.graph_error(rows)
    if reducer.settings.unused == "error" and not error and any(row.unused for row in rows):
        error = uses_of(rows, reducer.bucket_set, reducer.settings).error
    return error


def _consequence(step: str, *, own: bool, gated: bool) -> str:
    if own:
        return f"and the other ranks learned about {step} only now"
    if gated:
        return f"so no rank applied the update of {step}"
    return (
        f"which the others learn only now: their last update, that of {step}, lacked the gradients of that rank, and "
        f"replicas may differ"
    )
