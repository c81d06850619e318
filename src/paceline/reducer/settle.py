"""After the last bucket: what the ranks told each other is applied, and the gradients go back to their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.api import Transport
from paceline.reducer import agreement
from paceline.reducer.agreement import Mode, Words
from paceline.reducer.buckets import BucketSet
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
        agreement.reduce_late(slots, transport, weighting.of_late(division), timeout_s)
    weighted = any(row.mode is Mode.WEIGHTED for row in words)
    factor = Weighting.on_the_way_out(sum(row.weight for row in words) if weighted else None, division)
    if factor != 1.0:
        for bucket in buckets.buckets:
            bucket.flat.mul_(factor)
    if not any(row.unused for row in words):
        return Settled(None, None)
    uses = agreement.count_uses(slots, transport, timeout_s)
    error = agreement.unused_error(slots, transport, timeout_s) if settings.unused == "error" else None
    return Settled(uses, error)


def hand_back(buckets: BucketSet, uses: Sequence[int] | None, *, lent: bool) -> None:
    """Give every gradient back to its parameter. Where no rank used it, or it was only `lent`, as it was before."""
    for bucket in buckets.buckets:
        if uses is None and not lent:
            bucket.hand_all_back()
            continue
        for slot in bucket.slots:
            if not slot.asleep:
                bucket.hand_back(slot, touched=not lent and (uses is None or uses[slot.index] > 0))
