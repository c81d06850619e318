"""Where to cut the stream of gradients into buckets, from measured times. Pure functions on values.

Gradients become ready one after another and buckets are reduced one after another, each in `α + β·bytes`. With
`ready_k` the time of the last gradient of bucket k of n, and `S_k` the bytes of buckets 1..k, the last one ends at

    end = max over k of  ready_k + (n - k + 1)·α + β·(S_n - S_{k-1})

Few buckets leave many bytes for the end; many buckets pay α often. `plan_boundaries` finds the best cuts.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.errors import CollectiveMismatch, UsageError
from paceline.layout import MIB, BucketCaps, ParamMeta, cap_groups

Groups = tuple[tuple[int, ...], ...]  # parameter indices of each bucket, in the order of launches

ON_CALLER_BUCKET_BYTES = 32 * MIB  # see `_plan_on_caller`
RESERVE = 1.5
TIE_S = 1e-6  # ends closer together than this count as equal: no measurement here is more precise
HALVINGS = 40
_NO_CAP = BucketCaps((2**62,))


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one reduction of n bytes: alpha_s + beta_s_per_byte · n."""

    alpha_s: float
    beta_s_per_byte: float
    progress_on_caller: bool = False  # the computing thread itself does the work, between gradients

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.alpha_s, self.beta_s_per_byte)):
            raise UsageError(
                f"expected a finite time of zero or more per reduction and per byte, got alpha_s={self.alpha_s}, "
                f"beta_s_per_byte={self.beta_s_per_byte}; measure again, or see fit_cost()"
            )

    def of(self, nbytes: int) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def slower(self, factor: float) -> "Cost":
        """The cost of reductions that take `factor` times as long."""
        return Cost(self.alpha_s * factor, self.beta_s_per_byte * factor, self.progress_on_caller)


def fit_cost(samples: Iterable[tuple[int, float]], *, progress_on_caller: bool = False) -> Cost:
    """Fit a line to measured (bytes, seconds), of two sizes or more.

    Only the fastest sample of each size counts, because disturbances and late peers only add time. Errors count
    relative to the time; otherwise the largest size alone would decide α.
    """
    fastest: dict[int, float] = {}
    for nbytes, seconds in samples:
        if not (nbytes >= 0 and math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"expected samples of bytes and seconds of zero or more, got ({nbytes}, {seconds})")
        fastest[nbytes] = min(fastest.get(nbytes, math.inf), max(seconds, 1e-9))
    if len(fastest) < 2:
        raise UsageError(f"expected samples of two sizes or more, got {sorted(fastest)} bytes; measure another size")
    rows = [(1.0 / seconds, nbytes / seconds) for nbytes, seconds in fastest.items()]  # α·u + β·v should be 1
    uu, uv, vv = (sum(row[a] * row[b] for row in rows) for a, b in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[a] for row in rows) for a in (0, 1))
    determinant = uu * vv - uv * uv
    alpha, beta = ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant) if determinant > 0 else (0.0, -1.0)
    if beta < 0:
        alpha, beta = u / uu, 0.0
    elif alpha < 0:
        alpha, beta = 0.0, v / vv
    return Cost(alpha, beta, progress_on_caller)


@dataclass(frozen=True, slots=True)
class Ready:
    """One gradient: its size, and when it was ready, in seconds since the start of backward."""

    param: int
    nbytes: int
    ready_s: float
    kind: Hashable | None = 0  # gradients of one kind may share a bucket; None shares with no other (sparse)


@dataclass(frozen=True, slots=True)
class ReadyCurve:
    """When the gradients became ready, earliest first, and when backward ended.

    An unused parameter counts as ready when backward ends.
    """

    gradients: tuple[Ready, ...]
    backward_end_s: float

    @classmethod
    def of(
        cls, params: Sequence[ParamMeta], order: Sequence[int], ready_s: Mapping[int, float], backward_end_s: float
    ) -> "ReadyCurve":
        """The curve of `params`, whose gradients came in `order`. Those without a time were not used."""
        gradients = (
            Ready(param, params[param].nbytes, ready_s.get(param, backward_end_s), params[param].kind)
            for param in order
        )
        return cls(tuple(gradients), backward_end_s)

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


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
        """What `groups` are expected to cost, whether or not they were planned here."""
        buckets = _timed(groups, curve.gradients)
        sizes = tuple(bucket.nbytes for bucket in buckets)
        if cost.progress_on_caller:
            exposed = cost.of(sizes[-1]) if sizes else 0.0
        else:
            exposed = max(0.0, _mean_end(buckets, [cost]) - curve.backward_end_s)
        return cls(tuple(bucket.params for bucket in buckets), sizes, exposed, sum(map(cost.of, sizes)), cost)

    def describe(self) -> str:
        """One line for people."""
        low, high = (_mib(pick(self.bucket_bytes, default=0)) for pick in (min, max))
        sizes = f"{low} MiB" if low == high else f"{low}–{high} MiB"
        count = len(self.groups)
        return (
            f"{count} bucket{'' if count == 1 else 's'}, {sizes}; predicted exposed {_ms(self.predicted_exposed_s)} of "
            f"{_ms(self.predicted_busy_s)} (α {self.cost.alpha_s * 1e6:.3g} µs, "
            f"β {self.cost.beta_s_per_byte * 1e9:.3g} ns/B"
            f"{', reduced by the calling thread' if self.cost.progress_on_caller else ''})"
        )


def plan_boundaries(curve: ReadyCurve, cost: Cost, *, reserve: float = RESERVE) -> Plan:
    """The buckets whose last reduction ends first, and of those the fewest.

    `reserve=1.0` takes the cost at its word, and then the plan is exact (up to TIE_S) when all gradients are of one
    kind. Gradients of several kinds interleave, and there the best of some partitions is taken, torch's default sizes
    among them.

    Why a reserve
    -------------
    The fewest buckets that end first leave no slack: each is cut so late that it is done just when the next is full.
    If reductions then take half as long again as was measured on a quiet transport, the delays add up to more than any
    plan has saved. So plans are compared by the mean of their ends, at the cost and at `reserve` times it.
    """
    if not 1.0 <= reserve < math.inf:
        raise UsageError(f"expected a reserve of 1.0 (none) or more, got {reserve}")
    kinds = {gradient.kind for gradient in curve.gradients}
    factors = [1.0] if reserve == 1.0 else [1 + (reserve - 1) * part / 4 for part in range(5)]
    costs = [cost.slower(factor) for factor in factors]
    if not curve.gradients:
        groups = []
    elif cost.progress_on_caller:
        groups = _plan_on_caller(curve.gradients, cost)
    elif len(kinds) == 1 and None not in kinds:
        groups = _plan_one_kind(curve.gradients, costs)
    else:
        groups = _plan_mixed(curve.gradients, costs)
    return Plan.of(groups, curve, cost)


def _plan_on_caller(gradients: Sequence[Ready], cost: Cost) -> list[list[int]]:
    """Buckets for a transport whose reductions are done by the computing thread, between gradients.

    n reductions take n·α + β·bytes of the thread's time wherever they are done, and delay every later gradient by it.
    So the step ends at compute + n·α + β·bytes, plus the wait for a peer that is late, which no partition shortens:
    that peer has found all others ready and has only its last bucket to do. By this line one bucket would be best.
    Measured on two cores, steps with buckets of 8 to 200 MiB differ by less than the noise, and smaller ones cost
    more: every start meets cold caches. So buckets are large, but not so large that all ranks reduce at the same time,
    at the end, when they share the memory's bandwidth. What remains after the last gradient is one bucket. It is cut
    small where that saves more than the α it costs.
    """
    items = [(gradient.param, gradient.kind, gradient.nbytes) for gradient in gradients]
    groups = cap_groups(items, BucketCaps((ON_CALLER_BUCKET_BYTES,)))
    if not cost.beta_s_per_byte:
        return groups
    size = {gradient.param: gradient.nbytes for gradient in gradients}
    worth = cost.alpha_s / cost.beta_s_per_byte  # bytes that take as long as starting a reduction
    last = groups.pop()
    left = list(accumulate(size[param] for param in reversed(last)))  # bytes of the last 1, 2, … gradients
    keep = bisect_right(left, worth) or 1
    halves = [last[:-keep], last[-keep:]] if left[-1] - left[keep - 1] > worth else [last]
    position = {gradient.param: place for place, gradient in enumerate(gradients)}
    return sorted([*groups, *halves], key=lambda group: position[group[-1]])


# ---- the search for the best cuts


class _Bucket(NamedTuple):
    """A bucket and the time at which it is full."""

    params: tuple[int, ...]
    ready_s: float
    nbytes: int
    kind: Hashable | None

    def and_then(self, other: "_Bucket") -> "_Bucket":
        latest = max(self.ready_s, other.ready_s)
        return _Bucket(self.params + other.params, latest, self.nbytes + other.nbytes, other.kind)


def _timed(groups: Iterable[Sequence[int]], gradients: Sequence[Ready]) -> list[_Bucket]:
    by_param = {gradient.param: gradient for gradient in gradients}
    found = []
    for group in groups:
        members = [by_param[param] for param in group]
        latest = max(member.ready_s for member in members)
        found.append(_Bucket(tuple(group), latest, sum(member.nbytes for member in members), members[0].kind))
    return found


def _mean_end(buckets: Sequence[_Bucket], costs: Sequence[Cost]) -> float:
    """When the last of `buckets` has been reduced, one after the other: the mean at the lowest and the highest cost."""
    ends = [0.0, 0.0]
    for bucket in buckets:
        for i in (0, -1):
            ends[i] = max(ends[i], bucket.ready_s) + costs[i].of(bucket.nbytes)
    return sum(ends) / 2


def _best(tried: Sequence[Sequence[_Bucket]], costs: Sequence[Cost]) -> int:
    """Which of `tried` ends first, and of those that do has the fewest buckets."""
    ends = [_mean_end(buckets, costs) for buckets in tried]
    bound = min(ends) + TIE_S
    return min((len(buckets), number) for number, buckets in enumerate(tried) if ends[number] <= bound)[1]


def _plan_one_kind(gradients: Sequence[Ready], costs: Sequence[Cost]) -> list[list[int]]:
    """The consecutive groups that end first, and of those the fewest. Exact for one cost; for several, the best of the
    exact ones for each."""
    ready = list(accumulate((gradient.ready_s for gradient in gradients), max))
    sums = [0, *accumulate(gradient.nbytes for gradient in gradients)]
    tried = [cuts for cost in costs for cuts in _candidates(ready, sums, cost)]
    buckets = [[_Bucket((), ready[b - 1], sums[b] - sums[a], 0) for a, b in pairwise(cuts)] for cuts in tried]
    best = tried[_best(buckets, costs)]
    return [[gradient.param for gradient in gradients[a:b]] for a, b in pairwise(best)]


def _candidates(ready: Sequence[float], sums: Sequence[int], cost: Cost) -> Iterator[list[int]]:
    """The cuts with the fewest buckets for ends that come closer and closer to the earliest possible one."""
    low = max(ready[-1], ready[0] + cost.of(sums[-1]))  # nothing ends sooner
    high = ready[-1] + len(ready) * cost.alpha_s + cost.beta_s_per_byte * sums[-1]  # each gradient alone ends by then
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        cuts = _fewest_cuts(middle, ready, sums, cost)
        if cuts is None:
            low = middle
        else:
            high = middle
            yield cuts
    if cuts := _fewest_cuts(max(high, low + TIE_S), ready, sums, cost):
        yield cuts


def _fewest_cuts(end_s: float, ready: Sequence[float], sums: Sequence[int], cost: Cost) -> list[int] | None:
    """The fewest buckets whose last one ends at `end_s` or sooner; None where no buckets do.

    By the formula at the top, a bucket that is followed by k others and is full at `ready` may begin where at most
    `(end_s - ready - (k + 1)·α) / β` bytes are left to send. So each bucket, from the last one back, is made as long as
    it can be: one that begins earlier leaves fewer gradients, which are ready sooner, to as many buckets.
    """
    cuts = [len(ready)]
    while (end := cuts[-1]) > 0:
        time_left = end_s - ready[end - 1] - len(cuts) * cost.alpha_s
        if time_left < 0:
            return None
        may_send = time_left / cost.beta_s_per_byte if cost.beta_s_per_byte else math.inf
        start = bisect_left(sums, sums[-1] - may_send, hi=end)
        if start == end:
            return None
        cuts.append(start)
    return cuts[::-1]


def _plan_mixed(gradients: Sequence[Ready], costs: Sequence[Cost]) -> list[list[int]]:
    """The best of: cuts that all kinds share, and sizes that each kind counts for itself. Then buckets are joined."""
    items = [(gradient.param, gradient.kind, gradient.nbytes) for gradient in gradients]
    tried = [cap_groups(items, caps) for caps in (_NO_CAP, BucketCaps.from_mib(None, None))]
    for count in (1, len({gradient.kind for gradient in gradients})):  # α once per cut, or once per kind
        dearer = [Cost(cost.alpha_s * count, cost.beta_s_per_byte) for cost in costs]
        cuts = pairwise([0, *accumulate(map(len, _plan_one_kind(gradients, dearer)))])
        tried.append([group for start, end in cuts for group in cap_groups(items[start:end], _NO_CAP)])
    joined = [_joined(_timed(groups, gradients), costs) for groups in tried]
    return [list(bucket.params) for bucket in joined[_best(joined, costs)]]


def _joined(buckets: list[_Bucket], costs: Sequence[Cost]) -> list[_Bucket]:
    """Join each bucket with the next of its kind where that does not delay the end."""
    bound = _mean_end(buckets, costs) + TIE_S
    place = 0
    while place < len(buckets):
        bucket = buckets[place]
        later = (i for i in range(place + 1, len(buckets)) if buckets[i].kind == bucket.kind is not None)
        partner = next(later, None)
        if partner is not None:
            joined = bucket.and_then(buckets[partner])
            tried = [*buckets[:place], *buckets[place + 1 : partner], joined, *buckets[partner + 1 :]]
            if _mean_end(tried, costs) <= bound:
                buckets = tried
                continue
        place += 1
    return buckets


# ---- plans between ranks


def encode_groups(groups: Iterable[Sequence[int]]) -> list[int]:
    """One number per parameter, whatever the buckets, so that every rank knows how many to receive.

    The first parameter of each bucket is written as its complement (~index).
    """
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


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2g}" if nbytes < 10 * MIB else f"{nbytes / MIB:.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
