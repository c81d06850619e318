"""After the last bucket: what the ranks told each other is applied, and the gradients go back to their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.collectives.group import Group
from paceline.reducer import report
from paceline.reducer.buckets import BucketSet
from paceline.reducer.lanes import late_gradient, total_weight
from paceline.reducer.report import WEIGHT, Mode, StepReport
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.weighting import Division, Weighting


@dataclass(frozen=True, slots=True)
class Settled:
    """What a reduction has shown."""

    uses: list[int] | None  # on how many ranks each parameter took part; None: on every one
    error: Exception | None  # to be raised, the same on every rank, once everything is in its place again


def settle(
    rows: Sequence[StepReport],
    buckets: BucketSet,
    group: Group,
    weighting: Weighting,
    division: Division,
    settings: ReducerSettings,
) -> Settled:
    """Make the sums in the buckets the means that were asked for. All ranks call it, with the same reports."""
    slots = buckets.slots
    if any(row.late for row in rows):
        if rows[0].lane_weights:
            return Settled(None, late_gradient(slots))
        report.reduce_late(slots, group, weighting.of_late(division))
    factor = _factor(rows, division)
    if factor != 1.0:
        for bucket in buckets.buckets:
            bucket.flat.mul_(factor)
    if factor == 0.0:  # nobody had anything to add
        return Settled([0] * len(slots), None)
    return uses_of(rows, buckets, settings)


def uses_of(rows: Sequence[StepReport], buckets: BucketSet, settings: ReducerSettings) -> Settled:
    """On how many ranks each parameter took part, and whether that is an error."""
    slots = buckets.slots
    if not any(row.unused for row in rows):
        return Settled(None, None)
    uses = report.count_uses(rows, len(slots))
    if settings.unused != "error":
        return Settled(uses, None)
    if rows[0].lane_weights:  # which ranks have not used a parameter depends on who ran which lanes
        return Settled(uses, report.unused_in_lanes(slots, uses))
    return Settled(uses, report.unused_error(slots, rows))


def _factor(rows: Sequence[StepReport], division: Division) -> float:
    """By what the sums in the buckets are multiplied to make them means over what counts."""
    weighted = any(row.mode is Mode.WEIGHTED for row in rows)
    if rows[0].lane_weights:
        total = total_weight([row.lane_weights for row in rows])
        if not weighted:  # then gradients were divided by the number of lanes on their way in
            return division.divisor / total if total else 0.0
        return Weighting.on_the_way_out(total, division)
    if weighted:
        return Weighting.on_the_way_out(sum(row.weight for row in rows), division)
    counting = len(rows) - sum(row.skipped for row in rows)
    factor = len(rows) / counting if counting else 0.0
    return factor * Weighting.on_the_way_out(None, division)


def settle_on_device(
    gathered: torch.Tensor, buckets: BucketSet, weighting: Weighting, division: Division, lanes: int
) -> None:
    """The same factor as `settle` has, from the reports as they are on the device, and nobody waits for it.

    Weights are added lane by lane, each of which one rank has and all others have as zero: so the sum does not depend
    on the number of ranks.
    """
    columns = gathered.view(torch.float64)
    weights = columns[:, -lanes:].sum(0) if lanes else columns[:, WEIGHT]
    total = weights.sum()
    if weighting.mode is Mode.WEIGHTED:
        counted = float(division.size if division.by_reduction else 1)
    else:
        counted = division.divisor
    factor = torch.where(total > 0, counted / total, 0.0)
    for bucket in buckets.buckets:
        flat = bucket.flat
        if flat.dtype in (
            torch.float16,
            torch.bfloat16,
        ):  # their product would round the factor to their type
            flat.copy_(flat.float().mul_(factor.float()))
        else:
            flat.mul_(factor.to(flat.dtype))


def hand_back(buckets: BucketSet, uses: Sequence[int] | None, *, lent: bool) -> None:
    """Give every gradient back to its parameter. Where no rank used it, or it was only `lent`, as it was before."""
    for bucket in buckets.buckets:
        if uses is None and not lent:
            bucket.hand_all_back()
            continue
        for slot in bucket.slots:
            if not slot.asleep:
                bucket.hand_back(slot, touched=not lent and (uses is None or uses[slot.index] > 0))
