"""The search for the best cuts: exact where all gradients may share buckets, the best of some where they may not."""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.bucket_plan.cost import Cost, Ready
from paceline.layout import BucketCaps, cap_groups

# Cuts are looked for at the ends of at most this many pieces of about equal bytes. A cut inside a piece can be moved to
# the piece's beginning: its bucket is ready no later, and less than one piece more is left to send. So the loss is at
# most β · bytes / MAX_PIECES, 0.4 % of the time on the wire. (Under `max_bucket_bytes` a moved cut may not fit.)
MAX_PIECES = 256
# Ends that are closer together than this are equal: nothing here is measured more finely.
TIE_S = 1e-6
_NO_CAP = BucketCaps((2**62,))


@dataclass(frozen=True, slots=True)
class Timed:
    """A bucket with the time at which it is full."""

    params: tuple[int, ...]
    ready_s: float
    nbytes: int
    kind: Hashable | None

    @classmethod
    def of(cls, members: Sequence[Ready]) -> "Timed":
        latest = max(member.ready_s for member in members)
        return cls(tuple(m.param for m in members), latest, sum(m.nbytes for m in members), members[0].kind)

    def and_then(self, other: "Timed") -> "Timed":
        latest = max(self.ready_s, other.ready_s)
        return Timed(self.params + other.params, latest, self.nbytes + other.nbytes, other.kind)


def end_of(buckets: Iterable[Timed], cost: Cost) -> float:
    """When the last of `buckets` has been reduced, one after the other."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready_s) + cost.of(bucket.nbytes)
    return end


def plan_one_kind(gradients: Sequence[Ready], costs: Sequence[Cost], limit: float) -> list[list[int]]:
    """The consecutive groups that end first, on average over `costs`, and of those the fewest. Exact for one cost."""
    pieces = _pieces(gradients, limit)
    timed = [Timed.of(piece) for piece in pieces]
    ready = list(accumulate((piece.ready_s for piece in timed), max))
    sums = [0, *accumulate(piece.nbytes for piece in timed)]
    tried = [cuts for cost in costs for cuts in _candidates(ready, sums, cost, limit)]
    buckets = [[Timed((), ready[b - 1], sums[b] - sums[a], 0) for a, b in pairwise(cuts)] for cuts in tried]
    best = tried[_best(buckets, costs)]
    return [[gradient.param for piece in pieces[a:b] for gradient in piece] for a, b in pairwise(best)]


def plan_mixed(gradients: Sequence[Ready], costs: Sequence[Cost], limit: float) -> list[list[int]]:
    """The best of: cuts that all kinds share, and sizes that each kind counts for itself. Then buckets are joined."""
    by_param = {gradient.param: gradient for gradient in gradients}
    items = [(gradient.param, gradient.kind, gradient.nbytes) for gradient in gradients]
    tried = [cap_groups(items, caps, limit) for caps in (_NO_CAP, BucketCaps.from_mib(None, None))]
    for count in (1, len({gradient.kind for gradient in gradients})):  # α once per cut, or once per kind
        dearer = [Cost(cost.alpha_s * count, cost.beta_s_per_byte) for cost in costs]
        cuts = pairwise([0, *accumulate(map(len, plan_one_kind(gradients, dearer, limit)))])
        tried.append([group for start, end in cuts for group in cap_groups(items[start:end], _NO_CAP)])
    timed = [[Timed.of([by_param[param] for param in group]) for group in groups] for groups in tried]
    joined = [_joined(buckets, costs, limit) for buckets in timed]
    return [list(bucket.params) for bucket in joined[_best(joined, costs)]]


def _mean_end(buckets: Sequence[Timed], costs: Sequence[Cost]) -> float:
    return sum(end_of(buckets, cost) for cost in costs) / len(costs)


def _best(tried: Sequence[Sequence[Timed]], costs: Sequence[Cost]) -> int:
    """Which of `tried` ends first, and of those that do has the fewest buckets."""
    ends = [_mean_end(buckets, costs) for buckets in tried]
    bound = min(ends) + TIE_S
    return min((len(buckets), number) for number, buckets in enumerate(tried) if ends[number] <= bound)[1]


def _joined(buckets: list[Timed], costs: Sequence[Cost], limit: float) -> list[Timed]:
    """Join each bucket with the next of its kind where that does not delay the end."""
    bound = _mean_end(buckets, costs) + TIE_S
    place = 0
    while place < len(buckets):
        bucket = buckets[place]
        later = (i for i in range(place + 1, len(buckets)) if buckets[i].kind == bucket.kind is not None)
        partner = next(later, None)
        if partner is not None and bucket.nbytes + buckets[partner].nbytes <= limit:
            joined = bucket.and_then(buckets[partner])
            tried = [*buckets[:place], *buckets[place + 1 : partner], joined, *buckets[partner + 1 :]]
            if _mean_end(tried, costs) <= bound:
                buckets = tried
                continue
        place += 1
    return buckets


def _pieces(gradients: Sequence[Ready], limit: float) -> list[list[Ready]]:
    """Consecutive gradients that are not cut apart: see MAX_PIECES."""
    if len(gradients) <= MAX_PIECES:
        return [[gradient] for gradient in gradients]
    enough = max(1.0, sum(gradient.nbytes for gradient in gradients) / MAX_PIECES)
    pieces: list[list[Ready]] = [[]]
    held = 0
    for gradient in gradients:
        if pieces[-1] and (held >= enough or held + gradient.nbytes > limit):
            pieces.append([])
            held = 0
        pieces[-1].append(gradient)
        held += gradient.nbytes
    return pieces


def _candidates(ready: Sequence[float], sums: Sequence[int], cost: Cost, limit: float) -> Iterator[list[int]]:
    """Cuts to choose from: the best with at most 1, 2, 3, … buckets, up to the number that ends as early as any, and
    those where every bucket ends as early as it can.

    Among the former is the smallest number of buckets that ends first. It has to be asked of the whole: a prefix may
    end later than it could, with fewer buckets, if the next bucket has to wait for its gradients anyway.
    """
    count = len(ready)
    best, starts = _earliest_ends(None, ready, sums, cost, limit)
    yield _traced([starts] * count, count)
    ends = [0.0] + [math.inf] * count
    steps: list[list[int]] = []
    while ends[-1] > best[-1] + TIE_S and len(steps) < MAX_PIECES:
        ends, starts = _earliest_ends(ends, ready, sums, cost, limit)
        steps.append(starts)
        if ends[-1] < math.inf:
            yield _traced(list(steps), count)


def _traced(steps: list[list[int]], end: int) -> list[int]:
    """The cuts, from the best beginning of each bucket, for every end, in every step."""
    cuts = [end]
    while cuts[-1] > 0:
        cuts.append(steps.pop()[cuts[-1]])
    return cuts[::-1]


def _earliest_ends(
    before: Sequence[float] | None, ready: Sequence[float], sums: Sequence[int], cost: Cost, limit: float
) -> tuple[list[float], list[int]]:
    """ends[j] = min over i < j of max(ready_j, before[i]) + α + β·bytes(i..j), and the best i: one more bucket after
    prefixes that end at `before`, or, without it, any number of buckets.

    A longer prefix never ends before a shorter one, so this takes linear time: of the prefixes that have ended when
    gradient j is ready, the longest leaves the fewest bytes; the others queue, and a sliding window has their smallest
    `before[i] - β·S_i`. Both windows only move forward.
    """
    beta = cost.beta_s_per_byte
    ends, starts = [0.0], [-1]
    source = ends if before is None else before
    window: deque[int] = deque()
    low = in_time = 0  # the shortest prefix within `limit`, the longest that has ended
    for j in range(1, len(sums)):
        while window and source[window[-1]] - beta * sums[window[-1]] >= source[j - 1] - beta * sums[j - 1]:
            window.pop()
        window.append(j - 1)
        while low < j - 1 and sums[j] - sums[low] > limit:
            low += 1
        while in_time + 1 < j and source[in_time + 1] <= ready[j - 1]:
            in_time += 1
        while window and window[0] < max(low, in_time + 1):
            window.popleft()
        choices = [*([in_time] if in_time >= low else []), *([window[0]] if window else [])]
        end, start = min((max(ready[j - 1], source[i]) + cost.of(sums[j] - sums[i]), i) for i in choices)
        ends.append(end)
        starts.append(start)
    return ends, starts
