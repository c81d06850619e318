"""Where buckets are cut, as a pure function of measured times."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.bucket_plan import (
    ON_CALLER_BUCKET_BYTES,
    TIE_S,
    Cost,
    Plan,
    Ready,
    ReadyCurve,
    decode_groups,
    encode_groups,
    fit_cost,
    plan_boundaries,
)
from paceline.errors import CollectiveMismatch, UsageError
from paceline.layout import MIB, BucketCaps, ParamMeta, cap_groups, lay_groups, plan_layout

KIB = 1024
CPU = torch.device("cpu")
CLOSE = 1e-9

exact = partial(plan_boundaries, reserve=1.0)


def curve(*gradients: tuple[float, int], end: float = 0.0, kinds: Sequence[Any] = ()) -> ReadyCurve:
    """Gradients as (ready_s, bytes)."""
    named = tuple(
        Ready(index, nbytes, ready, kinds[index] if kinds else 0) for index, (ready, nbytes) in enumerate(gradients)
    )
    return ReadyCurve(named, max([end, *(ready for ready, _ in gradients)]))


def partitions(count: int) -> Iterator[list[list[int]]]:
    """Every way to cut 0..count-1 into consecutive groups."""
    for cuts in range(count):
        for places in combinations(range(1, count), cuts):
            yield [list(range(start, end)) for start, end in pairwise([0, *places, count])]


def end_by_formula(groups: Sequence[Sequence[int]], times: ReadyCurve, cost: Cost) -> float:
    """The closed form: each bucket's gradients, then everything from that bucket on."""
    sizes = [sum(times.gradients[param].nbytes for param in group) for group in groups]
    ready = [max(times.gradients[param].ready_s for param in group) for group in groups]
    return max(
        ready[k] + (len(groups) - k) * cost.alpha_s + cost.beta_s_per_byte * sum(sizes[k:]) for k in range(len(groups))
    )


# ---- by example


def test_a_slow_start_of_reductions_asks_for_one_bucket() -> None:
    plan = exact(curve((0.01, KIB), (0.02, KIB), (0.03, KIB)), Cost(1.0, 0.0))
    assert plan.groups == ((0, 1, 2),)
    assert plan.predicted_exposed_s == pytest.approx(1.0)


def test_the_last_bucket_is_small_when_earlier_ones_have_time_to_fly() -> None:
    times = curve((0.1, 10 * MIB), (0.2, 10 * MIB), (0.9, MIB), (1.0, MIB))
    plan = exact(times, Cost(0.001, 1e-8))  # about 0.01 s per MiB
    assert plan.groups == ((0, 1), (2,), (3,)), "0 and 1 apart would not end sooner"
    assert plan.predicted_exposed_s == pytest.approx(0.001 + 1e-8 * MIB)


def test_a_slow_link_is_kept_busy_from_the_first_gradient() -> None:
    times = curve((0.1, 10 * MIB), (0.2, 10 * MIB), (0.3, 10 * MIB))
    plan = exact(times, Cost(0.0, 1e-7))  # about 1 s per bucket
    assert plan.groups == ((0,), (1, 2))
    assert plan.predicted_exposed_s == pytest.approx(0.1 + 3 * 10 * MIB * 1e-7 - 0.3)


def test_ready_times_that_are_equal_need_one_bucket() -> None:
    assert plan_boundaries(curve((0.5, KIB), (0.5, MIB), (0.5, 0)), Cost(1e-4, 1e-9)).groups == ((0, 1, 2),)


@pytest.mark.parametrize("on_caller", [False, True])
@pytest.mark.parametrize(
    ("times", "groups"),
    [
        (curve(), ()),
        (curve((0.1, MIB)), ((0,),)),
        (curve((0.1, 0)), ((0,),)),
        (curve((0.1, 0), (0.1, 0)), ((0, 1),)),
        (curve((0.1, KIB), (0.2, KIB), kinds=[None, None]), ((0,), (1,))),
        (curve((0.1, KIB), (0.1, KIB), kinds=["half", "single"]), ((0,), (1,))),
    ],
    ids=["nothing", "one", "zero bytes", "all zero bytes", "all sparse", "two kinds"],
)
def test_degenerate_models(times: ReadyCurve, groups: Any, on_caller: bool) -> None:
    plan = plan_boundaries(times, Cost(1e-4, 1e-9, on_caller))
    assert plan.groups == groups
    assert plan.describe()


def test_a_cost_of_nothing_is_one_bucket() -> None:
    plan = plan_boundaries(curve((0.1, MIB), (0.2, MIB)), Cost(0.0, 0.0))
    assert (plan.groups, plan.predicted_exposed_s) == (((0, 1),), 0.0)


def test_what_is_reduced_before_backward_ends_is_not_exposed() -> None:
    plan = plan_boundaries(curve((0.1, MIB), end=0.5), Cost(0.1, 0.0))
    assert plan.predicted_exposed_s == 0.0
    assert plan.predicted_busy_s == pytest.approx(0.1)


def test_a_small_kind_is_not_sent_with_every_bucket_of_the_large_one() -> None:
    layers = [(0.1 * layer, nbytes) for layer in range(1, 11) for nbytes in (4 * MIB, 512)]
    times = curve(*layers, kinds=["half", "single"] * 10)
    plan = plan_boundaries(times, Cost(0.01, 1e-8))
    small = [group for group in plan.groups if group[0] % 2]
    assert len(small) < len(plan.groups) - len(small)
    shared = [[2 * layer + kind] for layer in range(10) for kind in (0, 1)]
    assert plan.predicted_exposed_s <= Plan.of(shared, times, plan.cost).predicted_exposed_s + TIE_S


def test_a_plan_says_what_it_is() -> None:
    times = curve((0.01, 12 * MIB), (0.02, 300 * KIB), end=0.02)
    plan = Plan.of([[0], [1]], times, Cost(80e-6, 0.9e-9))
    assert plan.describe() == ("2 buckets, 0.29–12 MiB; predicted exposed 1.76 ms of 11.8 ms (α 80 µs, β 0.9 ns/B)")
    assert "1 bucket, 1 MiB;" in Plan.of([[0]], curve((0.1, MIB)), Cost(0, 0)).describe()


@pytest.mark.parametrize("bad", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))], ids=str)
def test_an_impossible_cost_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="expected a finite time of zero or more"):
        Cost(*bad)


def test_a_plan_with_a_reserve_bears_slower_reductions() -> None:
    times = curve(*[(0.01 * index, 4 * MIB) for index in range(1, 28)], (0.271, 256 * KIB))
    cost = Cost(3e-4, 1e-9)
    tight, wide = exact(times, cost), plan_boundaries(times, cost)
    assert wide.predicted_exposed_s == pytest.approx(tight.predicted_exposed_s, abs=1e-3)
    half_as_long_again = cost.slower(1.5)
    late = Plan.of(tight.groups, times, half_as_long_again).predicted_exposed_s
    assert Plan.of(wide.groups, times, half_as_long_again).predicted_exposed_s < late / 5


@pytest.mark.parametrize("bad", [0.5, 0, float("nan"), float("inf")], ids=str)
def test_an_impossible_reserve_is_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="a reserve of 1.0"):
        plan_boundaries(curve((0.1, KIB)), Cost(0, 0), reserve=bad)


# ---- reduced by the calling thread


def test_on_caller_buckets_are_few_and_the_last_one_is_small() -> None:
    times = curve(*[(0.01 * index, MIB) for index in range(1, 65)])
    cost = Cost(20e-6, 0.2e-9, progress_on_caller=True)
    plan = plan_boundaries(times, cost)
    assert set(plan.bucket_bytes[:-2]) == {ON_CALLER_BUCKET_BYTES}
    assert plan.bucket_bytes[-1] == MIB
    assert plan.predicted_exposed_s == pytest.approx(cost.of(MIB))
    assert plan.predicted_busy_s == pytest.approx(len(plan.groups) * 20e-6 + 64 * MIB * 0.2e-9)
    assert "reduced by the calling thread" in plan.describe()


def test_on_caller_a_last_bucket_is_not_cut_for_less_than_it_costs() -> None:
    times = curve((0.01, 10 * KIB), (0.02, 10 * KIB))
    assert plan_boundaries(times, Cost(20e-6, 0.2e-9, progress_on_caller=True)).groups == ((0, 1),)


# ---- what a reduction costs


def test_the_cost_of_two_sizes_is_the_line_through_them() -> None:
    cost = fit_cost([(1000, 2e-4), (101_000, 3e-4)])
    assert (cost.alpha_s, cost.beta_s_per_byte) == pytest.approx((1.99e-4, 1e-9))
    assert fit_cost([(1000, 2e-4), (101_000, 3e-4)], progress_on_caller=True).progress_on_caller


@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-12, 1e-7),
    sizes=st.sets(st.integers(0, 2**28), min_size=2, max_size=8),
    noise=st.lists(st.floats(1, 50), max_size=20),
)
def test_disturbances_do_not_change_the_cost(alpha: float, beta: float, sizes: set[int], noise: list[float]) -> None:
    ordered = sorted(sizes)
    clean = [(size, alpha + beta * size) for size in ordered]
    disturbed = [(ordered[i % len(ordered)], factor * clean[i % len(ordered)][1]) for i, factor in enumerate(noise)]
    cost = fit_cost([*disturbed, *clean])
    for size, seconds in clean:
        assert cost.of(size) == pytest.approx(seconds, rel=1e-4)


@given(samples=st.lists(st.tuples(st.integers(0, 2**28), st.floats(0, 10)), min_size=2, max_size=12))
def test_any_samples_give_a_cost(samples: list[tuple[int, float]]) -> None:
    assume(len({size for size, _ in samples}) > 1)
    cost = fit_cost(samples)
    assert cost.alpha_s >= 0 and cost.beta_s_per_byte >= 0
    assert cost.of(2**28) <= 2 * max(1e-9, *(s for _, s in samples)) * max(1.0, 2**28 / max(n for n, _ in samples))


@pytest.mark.parametrize("samples", [[], [(4, 0.1)], [(4, 0.1), (4, 0.2)]], ids=["none", "one", "one size"])
def test_one_size_is_not_enough(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(UsageError, match="two sizes or more"):
        fit_cost(samples)


@pytest.mark.parametrize("bad", [(-1, 0.1), (4, -0.1), (4, float("nan"))], ids=str)
def test_impossible_samples_are_refused(bad: tuple[int, float]) -> None:
    with pytest.raises(UsageError, match="zero or more"):
        fit_cost([(8, 0.1), bad])


# ---- for all

sizes = st.one_of(st.integers(0, 8 * MIB), st.sampled_from([0, KIB, MIB]))
steps = st.one_of(st.floats(0, 0.05), st.just(0.0))
costs = st.builds(Cost, st.floats(0, 0.05), st.floats(0, 1e-7))
caps = st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=3).map(lambda c: BucketCaps(tuple(c)))


@st.composite
def curves(draw: st.DrawFn, max_size: int = 9, kinds: Sequence[Any] = (0,)) -> ReadyCurve:
    rows = draw(st.lists(st.tuples(steps, sizes, st.sampled_from(kinds)), min_size=1, max_size=max_size))
    now, gradients = 0.0, []
    for index, (step, nbytes, kind) in enumerate(rows):
        now += step
        gradients.append(Ready(index, nbytes, now, kind))
    return ReadyCurve(tuple(gradients), now + draw(steps))


@given(times=curves(), cost=costs)
def test_no_partition_ends_sooner_and_none_as_soon_has_fewer_buckets(times: ReadyCurve, cost: Cost) -> None:
    plan = exact(times, cost)
    ends = {
        tuple(map(tuple, groups)): end_by_formula(groups, times, cost) for groups in partitions(len(times.gradients))
    }
    earliest = min(ends.values())
    assert ends[plan.groups] <= earliest + TIE_S + CLOSE
    assert len(plan.groups) <= min(len(groups) for groups, end in ends.items() if end <= earliest + TIE_S - CLOSE)
    assert plan.predicted_exposed_s == pytest.approx(max(0.0, ends[plan.groups] - times.backward_end_s), abs=CLOSE)


@given(times=curves(30), cost=costs, cap=caps)
def test_no_bucket_size_of_torch_ends_sooner(times: ReadyCurve, cost: Cost, cap: BucketCaps) -> None:
    metas = [ParamMeta("p", (g.nbytes,), (1,), torch.uint8, CPU) for g in times.gradients]
    layout = plan_layout(metas, range(len(metas)), cap)
    torchs = Plan.of([[slot.param for slot in bucket.slots] for bucket in layout.buckets], times, cost)
    assert exact(times, cost).predicted_exposed_s <= torchs.predicted_exposed_s + TIE_S + CLOSE


MIXED = ("half", "single", None)


@given(times=curves(24, MIXED), cost=costs, on_caller=st.booleans())
def test_every_plan_can_be_laid_out_and_sent(times: ReadyCurve, cost: Cost, on_caller: bool) -> None:
    cost = Cost(cost.alpha_s, cost.beta_s_per_byte, on_caller)
    plan = plan_boundaries(times, cost)
    dtypes = {"half": torch.int8, "single": torch.uint8, None: torch.int8}
    metas = [
        ParamMeta(f"p{g.param}", (g.nbytes,), (1,), dtypes[g.kind], CPU, g.kind is None)  # type: ignore[index]
        for g in times.gradients
    ]
    assert lay_groups(metas, plan.groups).order == tuple(param for group in plan.groups for param in group)
    assert ReadyCurve.of(metas, range(len(metas)), {}, 1.0).gradients[0].kind == metas[0].kind
    assert decode_groups(encode_groups(plan.groups), len(metas)) == plan.groups
    last_places = [group[-1] for group in plan.groups]
    assert last_places == sorted(last_places), "buckets are launched in the order in which they fill"
    assert all(list(group) == sorted(group) for group in plan.groups)
    assert plan.bucket_bytes == tuple(sum(times.gradients[param].nbytes for param in group) for group in plan.groups)


@given(times=curves(24, MIXED), cost=costs)
def test_several_kinds_end_no_later_than_with_torchs_default_sizes(times: ReadyCurve, cost: Cost) -> None:
    items = [(g.param, g.kind, g.nbytes) for g in times.gradients]
    for default in (BucketCaps((1 * MIB, 25 * MIB)), BucketCaps((2**60,))):
        torchs = Plan.of(cap_groups(items, default), times, cost)
        assert exact(times, cost).predicted_exposed_s <= torchs.predicted_exposed_s + 3 * TIE_S


@given(times=curves(20, MIXED), cost=costs)
def test_the_prediction_is_above_what_no_plan_can_beat(times: ReadyCurve, cost: Cost) -> None:
    plan = plan_boundaries(times, cost)
    first, last = times.gradients[0], times.gradients[-1]
    bounds = [
        first.ready_s + cost.of(times.nbytes),  # the wire is busy from the first gradient on
        last.ready_s + cost.of(last.nbytes),  # the last gradient has to be sent
    ]
    assert plan.predicted_exposed_s >= max(bounds) - times.backward_end_s - CLOSE
    assert plan.predicted_busy_s >= cost.of(times.nbytes) - CLOSE


@given(times=curves(20), cost=costs, factor=st.floats(1, 10))
def test_a_dearer_transport_is_never_predicted_to_be_faster(times: ReadyCurve, cost: Cost, factor: float) -> None:
    exposed = exact(times, cost).predicted_exposed_s
    for dearer in (
        cost.slower(factor),
        Cost(cost.alpha_s * factor, cost.beta_s_per_byte),
        Cost(cost.alpha_s, cost.beta_s_per_byte * factor),
    ):
        assert exact(times, dearer).predicted_exposed_s >= exposed - TIE_S - CLOSE


@given(times=curves(20, MIXED[:2]), cost=costs, reserve=st.floats(1, 4))
def test_a_reserve_is_kept_where_it_costs_less_than_it_may_save(times: ReadyCurve, cost: Cost, reserve: float) -> None:
    slower = cost.slower(reserve)
    late = ReadyCurve(times.gradients, 0.0)  # exposed is then the end itself

    def mean_end(groups: Any) -> float:
        return sum(Plan.of(groups, late, each).predicted_exposed_s for each in (cost, slower)) / 2

    kept = mean_end(plan_boundaries(times, cost, reserve=reserve).groups)
    if len({gradient.kind for gradient in times.gradients}) == 1:
        assert kept <= min(mean_end(exact(times, each).groups) for each in (cost, slower)) + TIE_S + CLOSE
    items = [(g.param, g.kind, g.nbytes) for g in times.gradients]
    assert kept <= mean_end(cap_groups(items, BucketCaps((1 * MIB, 25 * MIB)))) + 3 * TIE_S


# ---- many parameters


def many(count: int, seed: int) -> ReadyCurve:
    dice = random.Random(seed)
    ready = sorted(dice.uniform(0, 0.4) for _ in range(count))
    return curve(*[(now, dice.choice([0, 512, 2048, 4 * KIB, 4 * MIB])) for now in ready])


def earliest_end(times: ReadyCurve, cost: Cost) -> float:
    """By a dynamic programme over all consecutive buckets."""
    gradients = times.gradients
    ends = [0.0]
    for end in range(1, len(gradients) + 1):
        nbytes, best = 0, math.inf
        for start in range(end - 1, -1, -1):
            nbytes += gradients[start].nbytes
            best = min(best, max(gradients[end - 1].ready_s, ends[start]) + cost.of(nbytes))
        ends.append(best)
    return ends[-1]


@given(times=curves(60), cost=costs)
def test_the_exposed_time_is_that_of_the_exact_optimum(times: ReadyCurve, cost: Cost) -> None:
    best = max(0.0, earliest_end(times, cost) - times.backward_end_s)
    assert exact(times, cost).predicted_exposed_s <= best + TIE_S + CLOSE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", [Cost(1e-4, 1e-11), Cost(1e-4, 1e-9), Cost(0.0, 1e-9), Cost(1e-2, 0.0)], ids=str)
def test_many_parameters_are_planned_exactly(seed: int, cost: Cost) -> None:
    times = many(700, seed)
    best = max(0.0, earliest_end(times, cost) - times.backward_end_s)
    assert exact(times, cost).predicted_exposed_s <= best + TIE_S + CLOSE


@pytest.mark.parametrize(
    "cost", [Cost(0.0, 1e-10), Cost(1e-4, 1e-9), Cost(1e-5, 1e-10, progress_on_caller=True)], ids=str
)
def test_planning_takes_no_time_worth_noticing(cost: Cost) -> None:
    times = many(5000, 0)
    started = time.process_time()
    plan = plan_boundaries(times, cost)
    assert time.process_time() - started < 2.0
    assert sorted(param for group in plan.groups for param in group) == list(range(5000))


# ---- the way to other ranks


@pytest.mark.parametrize(
    ("flat", "count"),
    [([], 1), ([0], 1), ([~0, 0], 2), ([~0, 2], 2), ([~0, 1, 2], 2), ([~0], 2), ([1, ~0], 2)],
    ids=["nothing", "no start", "one twice", "unknown", "too many", "too few", "before the start"],
)
def test_a_garbled_plan_is_refused(flat: list[int], count: int) -> None:
    with pytest.raises(CollectiveMismatch, match=f"each of {count} parameters once"):
        decode_groups(flat, count)


def test_a_plan_is_one_number_per_parameter() -> None:
    assert encode_groups([[2, 0], [1]]) == [~2, 0, ~1]
    assert decode_groups([~2, 0, ~1], 3) == ((2, 0), (1,))
    assert decode_groups([], 0) == ()


def test_groups_that_cannot_share_a_bucket_are_refused() -> None:
    metas = [
        ParamMeta("w", (4,), (1,), torch.float32, CPU),
        ParamMeta("h", (4,), (1,), torch.float16, CPU),
        ParamMeta("s", (4,), (1,), torch.float32, CPU, sparse=True),
    ]
    for mixed in ([[0, 1], [2]], [[0, 2], [1]], [[2, 0], [1]]):
        with pytest.raises(UsageError, match="bucket 0 cannot hold both"):
            lay_groups(metas, mixed)
