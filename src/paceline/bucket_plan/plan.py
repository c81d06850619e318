"""Where to cut the stream of gradients into buckets.

Gradients become ready one after another and buckets are reduced one after another, each in `α + β·bytes`. With
`ready_k` the time of the last gradient of bucket k of n, and `S_k` the bytes of buckets 1..k, the last one ends at

    end = max over k of  ready_k + (n - k + 1)·α + β·(S_n - S_{k-1})

Few buckets leave many bytes for the end, many buckets pay α often. `plan_boundaries` finds the cuts that end first.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.bucket_plan.cost import Cost, Ready, ReadyCurve
from paceline.bucket_plan.cuts import Timed, end_of, plan_mixed, plan_one_kind
from paceline.errors import CollectiveMismatch, UsageError
from paceline.layout import MIB, BucketCaps, cap_groups

Groups = tuple[tuple[int, ...], ...]  # parameter indices of each bucket, in the order of launches

# See `_plan_inline`.
INLINE_BUCKET_BYTES = 32 * MIB
RESERVE = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """A partition of the gradients into buckets, and what it is expected to cost."""

    groups: Groups
    bucket_bytes: tuple[int, ...]
    predicted_exposed_s: float  # from the end of backward to the end of the last reduction
    predicted_busy_s: float  # all reductions together
    cost: Cost

    @classmethod
    def of(cls, groups: Iterable[Sequence[int]], curve: ReadyCurve, cost: Cost) -> "Plan":
        """What `groups` are expected to cost; also for buckets that were not planned here."""
        kept = tuple(tuple(group) for group in groups)
        by_param = {gradient.param: gradient for gradient in curve.gradients}
        buckets = [Timed.of([by_param[param] for param in group]) for group in kept]
        sizes = tuple(bucket.nbytes for bucket in buckets)
        if cost.inline:
            exposed = cost.of(sizes[-1]) if sizes else 0.0
        else:
            exposed = max(0.0, end_of(buckets, cost) - curve.backward_end_s)
        return cls(kept, sizes, exposed, sum(map(cost.of, sizes)), cost)

    def describe(self) -> str:
        """One line for people."""
        low, high = (_mib(pick(self.bucket_bytes, default=0)) for pick in (min, max))
        sizes = f"{low} MiB" if low == high else f"{low}–{high} MiB"
        count = len(self.groups)
        return (
            f"{count} bucket{'' if count == 1 else 's'}, {sizes}; predicted exposed {_ms(self.predicted_exposed_s)} of "
            f"{_ms(self.predicted_busy_s)} (α {self.cost.alpha_s * 1e6:.3g} µs, "
            f"β {self.cost.beta_s_per_byte * 1e9:.3g} ns/B{', inline' if self.cost.inline else ''})"
        )


def plan_boundaries(
    curve: ReadyCurve, cost: Cost, *, max_bucket_bytes: int | None = None, reserve: float = RESERVE
) -> Plan:
    """The buckets whose last reduction ends first, and of those the fewest.

    `reserve=1.0` takes the cost at its word, and then the plan is exact (up to MAX_PIECES and TIE_S) when all gradients
    are of one kind. Gradients of several kinds interleave, and there the best of some partitions is taken, torch's
    default sizes among them. No bucket is above `max_bucket_bytes`, unless a single gradient is.

    Why a reserve
    -------------
    The fewest buckets that end first leave no slack: each is cut so late that it is through just when the next is full.
    If reductions then take half as long again as was measured on a quiet transport, the delays add up to more than any
    plan has saved. So plans are compared by the mean of their ends, at the cost and at `reserve` times it.
    """
    if max_bucket_bytes is not None and max_bucket_bytes <= 0:
        raise UsageError(f"expected max_bucket_bytes above zero, got {max_bucket_bytes}; None means no limit")
    if not 1.0 <= reserve < math.inf:
        raise UsageError(f"expected a reserve of 1.0 (none) or more, got {reserve}")
    limit = math.inf if max_bucket_bytes is None else max_bucket_bytes
    if cost.inline:
        return Plan.of(_plan_inline(curve.gradients, cost, limit), curve, cost)
    kinds = {gradient.kind for gradient in curve.gradients}
    plan = plan_one_kind if len(kinds) <= 1 and None not in kinds else plan_mixed
    costs = [cost] if reserve == 1.0 else [cost, cost.slower(reserve)]
    return Plan.of(plan(curve.gradients, costs, limit), curve, cost)


def encode_groups(groups: Iterable[Sequence[int]]) -> list[int]:
    """One number per parameter, whatever the buckets, so that every rank knows how many come: the first parameter of
    each bucket is written as its complement (~index)."""
    return [~param if place == 0 else param for group in groups for place, param in enumerate(group)]


def decode_groups(flat: Sequence[int], count: int) -> Groups:
    """The reverse of `encode_groups`, for a model of `count` parameters."""
    groups: list[list[int]] = []
    for number in flat:
        if number < 0:
            groups.append([])
        if groups:
            groups[-1].append(~number if number < 0 else number)
    if sorted(param for group in groups for param in group) != list(range(count)) or len(flat) != count:
        raise CollectiveMismatch(
            f"expected a bucket plan with each of {count} parameters once, got {list(flat)[:20]} ({len(flat)} numbers);"
            f" wrap the same model, and issue the same collectives, on every rank"
        )
    return tuple(tuple(group) for group in groups)


def _plan_inline(gradients: Sequence[Ready], cost: Cost, limit: float) -> list[list[int]]:
    """Buckets for a transport whose reductions are done by the computing thread, between gradients.

    What the partition changes, and what it does not
    ------------------------------------------------
    n reductions take n·α + β·bytes of the thread's time wherever they are done, and delay every later gradient by it.
    So the step ends at compute + n·α + β·bytes, plus the wait for a peer that is late by some skew, which no partition
    shortens: that peer has found all others ready and has only its last bucket to do. By this line one bucket would be
    best. Measured on two cores, steps with buckets of 8 to 200 MiB differ by less than the noise, and smaller ones cost
    more: every start meets cold caches. So buckets are large, but not so large that all ranks reduce at the same time,
    at the end, when they share the memory's bandwidth. What remains after the last gradient is one bucket. It is cut
    small where that saves more than the α it costs.
    """
    items = [(gradient.param, gradient.kind, gradient.nbytes) for gradient in gradients]
    groups = cap_groups(items, BucketCaps((INLINE_BUCKET_BYTES,)), limit)
    if not groups or not cost.beta_s_per_byte:
        return groups
    size = {gradient.param: gradient.nbytes for gradient in gradients}
    worth = cost.alpha_s / cost.beta_s_per_byte  # bytes that take as long as starting a reduction
    last = groups.pop()
    left = list(accumulate(size[param] for param in reversed(last)))  # bytes of the last 1, 2, … gradients
    keep = bisect_right(left, worth) or 1
    halves = [last[:-keep], last[-keep:]] if left[-1] - left[keep - 1] > worth else [last]
    position = {gradient.param: place for place, gradient in enumerate(gradients)}
    return sorted([*groups, *halves], key=lambda group: position[group[-1]])


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2g}" if nbytes < 10 * MIB else f"{nbytes / MIB:.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
