"""After the last bucket: sums become the means that were asked for, and the gradients go back to their parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.reducer import report_errors
from paceline.reducer.buckets import BucketSet
from paceline.reducer.late_gradients import drop_late, reduce_late, scale_of_late
from paceline.reducer.report import Abort, Mode, StepReport, StepRole
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.step import Division, Weighting
from paceline.reducer.used_params import count_uses

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


def check_together(rows: Sequence[StepReport]) -> None:
    """Raise, on every rank alike, when the reports of all ranks cannot belong together."""
    told = {(r.reduction, r.launch_digest, r.owned_elsewhere, r.lane_step, r.mode, r.microbatches) for r in rows}
    if len(told) > 1 or rows[0].mode is Mode.MIXED:
        report_errors.explain_mismatch(rows)


def is_aborted(rows: Sequence[StepReport]) -> bool:
    """Whether some rank had no gradients, so that nobody has."""
    return any(row.abort is not Abort.NO for row in rows)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a reduction has come to."""

    uses: list[int] | None = None  # on how many ranks each parameter took part; None: on every one
    error: Exception | None = None  # to be raised, the same on every rank, once everything is in its place again
    dropped: bool = False  # gradients are empty, so that an optimizer that steps changes nothing
    aborted: bool = False  # some rank had none, so nobody gets any
    plans: bool = False  # what the first backwards have taught about buckets can be shared by all ranks
    refuses: Callable[[], Exception] | None = None  # the error for further backwards, until there is a forward


def settle(reducer: "Reducer", rows: Sequence[StepReport]) -> Settled:
    """Make the sums in the buckets the means that were asked for. All ranks call it, with the same reports."""
    check_together(rows)
    reducer.batch.check(rows)
    for call in reducer.callbacks.finished:
        call()
    if is_aborted(rows):
        drop_late(reducer.bucket_set.slots)
        return _aborted(rows, own=reducer.contribution.role is StepRole.ABORTED)
    settled = _make_means(reducer, rows)
    if reducer.schedule.observer is not None:
        decision = reducer.schedule.observer.decide(rows, reducer.bucket_set.slots)
        error = decision.error or settled.error
        uses = [0] * len(reducer.bucket_set.slots) if decision.drops_gradients else settled.uses
        settled = Settled(uses, error, dropped=decision.drops_gradients)
    if any(row.graph_changed for row in rows):
        error = settled.error or reducer.contribution.graph_error or report_errors.graph_error(rows)
        settled = replace(settled, error=error)
    plans = not reducer.planning.over and rows[0].ready > 0 and not any(row.several for row in rows)
    return replace(settled, plans=True) if plans else settled


def _aborted(rows: Sequence[StepReport], *, own: bool) -> Settled:
    """No rank has gradients. The rank whose backward has failed knows why, and is told nothing."""
    if own:
        return Settled(aborted=True)
    threads = any(row.abort is Abort.THREADS for row in rows)
    # Then this rank may have a second backward to come, as that one had two at once. The error is made anew for it:
    # once it is raised it holds the graph, which holds the replica, in a cycle that Python's collector does not see.
    refuses = partial(report_errors.aborted_error, rows) if threads else None
    return Settled(error=report_errors.aborted_error(rows), aborted=True, refuses=refuses)


def _make_means(reducer: "Reducer", rows: Sequence[StepReport]) -> Settled:
    buckets, division = reducer.bucket_set, reducer.division()
    if any(row.late for row in rows):
        if rows[0].lane_weights:
            return Settled(error=report_errors.late_gradient(buckets.slots))
        reduce_late(buckets.slots, reducer.group, scale_of_late(reducer.weighting.current, division))
    factor = _factor(rows, division)
    if factor != 1.0:
        for part in buckets.results():
            part.mul_(factor)
    if factor == 0.0:  # nobody had anything to add
        return Settled([0] * len(buckets.slots))
    return uses_of(rows, buckets, reducer.settings)


def uses_of(rows: Sequence[StepReport], buckets: BucketSet, settings: ReducerSettings) -> Settled:
    """On how many ranks each parameter took part, and whether that is an error."""
    slots = buckets.slots
    if not any(row.unused for row in rows):
        return Settled()
    uses = count_uses(rows, len(slots))
    if settings.unused != "error":
        return Settled(uses)
    if rows[0].lane_weights:  # which ranks have not used a parameter depends on who ran which lanes
        return Settled(uses, report_errors.unused_in_lanes(slots, uses))
    return Settled(uses, report_errors.unused_error(slots, rows))


def _factor(rows: Sequence[StepReport], division: Division) -> float:
    """By what the sums in the buckets are multiplied to make them means over what counts."""
    weighted = any(row.mode is Mode.WEIGHTED for row in rows)
    if rows[0].lane_weights:
        total = math.fsum(weight for row in rows for weight in row.lane_weights)  # exactly, whoever ran which lanes
        if not weighted:  # then gradients were divided by the number of lanes on their way in
            return division.divisor / total if total else 0.0
        return Weighting.scale_out(total, division)
    if weighted:
        return Weighting.scale_out(sum(row.weight for row in rows), division)
    counting = len(rows) - sum(row.skipped for row in rows)
    factor = len(rows) / counting if counting else 0.0
    return factor * Weighting.scale_out(None, division)


def publish_grads(buckets: BucketSet, uses: Sequence[int] | None, *, lent: bool) -> None:
    """Give every gradient back to its parameter. Where no rank used it, or it was only `lent`, as it was before."""
    for bucket in buckets.buckets:
        if uses is None and not lent:
            bucket.publish_all()
            continue
        for slot in bucket.slots:
            if not slot.owned_elsewhere:
                bucket.publish_grads(slot, touched=not lent and (uses is None or uses[slot.index] > 0))
