"""After the last bucket: what the ranks told each other is applied, and the gradients go back to their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.api import Transport
from paceline.reducer import agreement
from paceline.reducer.agreement import Mode, Words
from paceline.reducer.buckets import BucketSet
from paceline.reducer.lanes import late_gradient, total_weight
from paceline.reducer.settings import ReducerSettings
from paceline.reducer.weighting import Division, Weighting


@dataclass(frozen=True, slots=True)
class Settled:
    """What a reduction has shown."""

    uses: list[int] | None  # on how many ranks each parameter took part; None: on every one
    error: Exception | None  # to be raised, the same on every rank, once everything is in its place again


def settle(
    words: Sequence[Words],
    buckets: BucketSet,
    transport: Transport,
    weighting: Weighting,
    division: Division,
    settings: ReducerSettings,
) -> Settled:
    """Make the sums in the buckets the means that were asked for. All ranks call it, with the same words."""
    slots, timeout_s = buckets.slots, settings.timeout_s
    if any(row.late for row in words):
        if words[0].lane_weights:
            return Settled(None, late_gradient(slots))
        agreement.reduce_late(slots, transport, weighting.of_late(division), timeout_s)
    factor = _factor(words, division)
    if factor != 1.0:
        for bucket in buckets.buckets:
            bucket.flat.mul_(factor)
    if factor == 0.0:  # nobody had anything to add
        return Settled([0] * len(slots), None)
    if not any(row.unused for row in words):
        return Settled(None, None)
    uses = agreement.count_uses(slots, transport, timeout_s)
    if settings.unused != "error":
        return Settled(uses, None)
    if words[0].lane_weights:  # which ranks have not used a parameter depends on who ran which lanes
        return Settled(uses, agreement.unused_in_lanes(slots, uses))
    return Settled(uses, agreement.unused_error(slots, transport, timeout_s))


def _factor(words: Sequence[Words], division: Division) -> float:
    """By what the sums in the buckets are multiplied to make them means over what counts."""
    weighted = any(row.mode is Mode.WEIGHTED for row in words)
    if words[0].lane_weights:
        total = total_weight([row.lane_weights for row in words])
        if not weighted:  # then gradients were divided by the number of lanes on their way in
            return division.divisor / total if total else 0.0
        return Weighting.on_the_way_out(total, division)
    if weighted:
        return Weighting.on_the_way_out(sum(row.weight for row in words), division)
    counting = len(words) - sum(row.skipped for row in words)
    factor = len(words) / counting if counting else 0.0
    return factor * Weighting.on_the_way_out(None, division)


def hand_back(buckets: BucketSet, uses: Sequence[int] | None, *, lent: bool) -> None:
    """Give every gradient back to its parameter. Where no rank used it, or it was only `lent`, as it was before."""
    for bucket in buckets.buckets:
        if uses is None and not lent:
            bucket.hand_all_back()
            continue
        for slot in bucket.slots:
            if not slot.asleep:
                bucket.hand_back(slot, touched=not lent and (uses is None or uses[slot.index] > 0))
