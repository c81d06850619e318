"""After the last bucket: sums become the requested means, and parameters get their gradients."""

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
    """Raise, on every rank alike, if the reports of the ranks are inconsistent."""
    told = {(r.reduction, r.launch_digest, r.owned_elsewhere, r.lane_step, r.mode, r.microbatches) for r in rows}
    if len(told) > 1 or rows[0].mode is Mode.MIXED:
        report_errors.explain_mismatch(rows)


def is_aborted(rows: Sequence[StepReport]) -> bool:
    """Whether some rank had no gradients, so that no rank has."""
    return any(row.abort is not Abort.NO for row in rows)


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a reduction."""

    uses: list[int] | None = None  # on how many ranks each parameter took part; None: on every one
    error: Exception | None = None  # to be raised, the same on every rank, once everything is restored
    dropped: bool = False  # gradients are empty, so that an optimizer that steps changes nothing
    aborted: bool = False  # some rank had none, so no rank gets any
    plans: bool = False  # what was learned about buckets can be shared by all ranks
    refuses: Callable[[], Exception] | None = None  # the error for further backwards, until the next forward


def settle(reducer: "Reducer", rows: Sequence[StepReport]) -> Settled:
    """Turn the sums in the buckets into the requested means. All ranks call it, with the same reports."""
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
    """No rank has gradients. The rank whose backward failed has its own error and gets none here."""
    if own:
        return Settled(aborted=True)
    threads = any(row.abort is Abort.THREADS for row in rows)
    # Then a second backward may follow on this rank, as the other had two at once. It gets a new error:
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
    if factor == 0.0:  # no rank contributed
        return Settled([0] * len(buckets.slots))
    return uses_of(rows, buckets, reducer.settings)


def uses_of(rows: Sequence[StepReport], buckets: BucketSet, settings: ReducerSettings) -> Settled:
    """The number of ranks on which each parameter took part, and whether that is an error."""
    slots = buckets.slots
    if not any(row.unused for row in rows):
        return Settled()
    uses = count_uses(rows, len(slots))
    if settings.unused != "error":
        return Settled(uses)
    if rows[0].lane_weights:  # which ranks have not used a parameter depends on which lanes they ran
        return Settled(uses, report_errors.unused_in_lanes(slots, uses))
    return Settled(uses, report_errors.unused_error(slots, rows))


def _factor(rows: Sequence[StepReport], division: Division) -> float:
    """The factor that turns the sums in the buckets into means."""
    weighted = any(row.mode is Mode.WEIGHTED for row in rows)
    if rows[0].lane_weights:
        total = math.fsum(weight for row in rows for weight in row.lane_weights)  # exact, whichever ranks ran the lanes
        if not weighted:  # then gradients were divided by the number of lanes when they entered
            return division.divisor / total if total else 0.0
        return Weighting.scale_out(total, division)
    if weighted:
        return Weighting.scale_out(sum(row.weight for row in rows), division)
    counting = len(rows) - sum(row.skipped for row in rows)
    factor = len(rows) / counting if counting else 0.0
    return factor * Weighting.scale_out(None, division)


def publish_grads(buckets: BucketSet, uses: Sequence[int] | None, *, lent: bool) -> None:
    """Set every parameter's gradient. If no rank used it, or it was only `lent`, restore what was there before."""
    for bucket in buckets.buckets:
        if uses is None and not lent:
            bucket.publish_all()
            continue
        for slot in bucket.slots:
            if not slot.owned_elsewhere:
                bucket.publish_grads(slot, touched=not lent and (uses is None or uses[slot.index] > 0))
