"""Where gradients live, as a pure function of parameter metadata."""

import random
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.layout import ALIGN_BYTES, MIB, BucketCaps, BucketSpec, Layout, ParamMeta, Slot, plan_layout

CPU = torch.device("cpu")


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32, sparse: bool = False) -> ParamMeta:
    return ParamMeta(name, shape, tuple(torch.empty(shape).stride()), dtype, CPU, sparse)


def names(layout: Layout) -> list[list[str]]:
    return [[layout.params[slot.param].name for slot in bucket.slots] for bucket in layout.buckets]


def plan(metas: list[ParamMeta], *caps: int, order: list[int] | None = None) -> Layout:
    return plan_layout(metas, list(range(len(metas))) if order is None else order, BucketCaps(caps))


# ------------------------------------------------------------------------------------------------------- by example

KIB = [meta(name, 256) for name in "abcdef"]  # 1 KiB each


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ((1,), [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ((2048,), [["a", "b"], ["c", "d"], ["e", "f"]]),
        ((2049,), [["a", "b", "c"], ["d", "e", "f"]]),
        ((1024, 3072), [["a"], ["b", "c", "d"], ["e", "f"]]),
        ((1024, 2048, 1024), [["a"], ["b", "c"], ["d"], ["e"], ["f"]]),
        ((MIB,), [["a", "b", "c", "d", "e", "f"]]),
    ],
)
def test_a_bucket_closes_at_its_cap(caps: tuple[int, ...], expected: list[list[str]]) -> None:
    assert names(plan(KIB, *caps)) == expected


def test_gradients_lie_in_the_order_given() -> None:
    layout = plan(KIB, 2048, order=[5, 0, 4, 1, 3, 2])
    assert names(layout) == [["f", "a"], ["e", "b"], ["d", "c"]]
    assert layout.order == (5, 0, 4, 1, 3, 2)


def test_dtypes_do_not_mix_and_a_bucket_stands_where_it_fills() -> None:
    metas = [meta("h1", 4, dtype=torch.float16), meta("f1", 4), meta("f2", 4), meta("h2", 4, dtype=torch.float16)]
    assert names(plan(metas, 16)) == [["f1"], ["f2"], ["h1", "h2"]]


def test_each_dtype_counts_its_own_caps() -> None:
    metas = [meta("f1", 4), meta("d1", 2, dtype=torch.float64), meta("f2", 4), meta("f3", 4)]
    assert names(plan(metas, 16, 32)) == [["f1"], ["d1"], ["f2", "f3"]]


def test_a_sparse_gradient_has_a_bucket_of_its_own_and_costs_nothing() -> None:
    layout = plan([meta("a", 4), meta("s", 1000, 8, sparse=True), meta("b", 4)], MIB)
    assert names(layout) == [["s"], ["a", "b"]]
    assert layout.buckets[0].sparse
    assert layout.nbytes == layout.buckets[1].nbytes == 2 * ALIGN_BYTES


def test_padding_is_counted() -> None:
    layout = plan([meta("a", 1), meta("b", 17), meta("c", 16)], MIB)
    assert [slot.offset for slot in layout.buckets[0].slots] == [0, 16, 48]
    assert layout.nbytes == 4 * 64


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_scalars_and_empty_parameters_have_a_place(shape: tuple[int, ...]) -> None:
    layout = plan([meta("a", *shape), meta("b", 2)], MIB)
    assert layout.buckets[0].slots[0].numel == meta("a", *shape).numel


def test_a_layout_is_a_value() -> None:
    one, same, other = plan(KIB, 1024), plan(list(KIB), 1024), plan(KIB, 2048)
    assert one == same
    assert one != other
    with pytest.raises(FrozenInstanceError):
        one.params = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "slots",
    [
        (Slot(0, 0, 4),),
        (Slot(0, 0, 4), Slot(0, 16, 4)),
        (Slot(0, 0, 4), Slot(1, 3, 4)),
        (Slot(1, 0, 40), Slot(0, 16, 4)),
    ],
    ids=["one missing", "one twice", "not aligned", "overlapping"],
)
def test_an_impossible_layout_cannot_be_made(slots: tuple[Slot, ...]) -> None:
    with pytest.raises(AssertionError):
        Layout((meta("a", 4), meta("b", 4)), (BucketSpec(0, torch.float32, CPU, slots, 64),))


# ------------------------------------------------------------------------------------------------- caps as users say


@pytest.mark.parametrize(
    ("cap", "listed", "expected"),
    [
        (None, None, (MIB, 25 * MIB)),
        (None, [], (MIB, 25 * MIB)),
        (25, None, (25 * MIB,)),
        (0.5, None, (MIB // 2,)),
        (1, [2, 3], (2 * MIB, 3 * MIB)),
    ],
)
def test_caps_follow_torch(cap: float | None, listed: list[float] | None, expected: tuple[int, ...]) -> None:
    caps = BucketCaps.from_mib(cap, listed)
    assert caps.caps == expected
    assert caps.listed == bool(listed)
    assert caps.of(0) == expected[0]
    assert caps.of(99) == expected[-1]


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "25", 1e-9], ids=str)
@pytest.mark.parametrize("as_list", [False, True], ids=["cap", "list"])
def test_bad_caps_are_refused(bad: Any, as_list: bool) -> None:
    with pytest.raises(UsageError, match="bucket sizes.*above zero"):
        BucketCaps.from_mib(None if as_list else bad, [bad] if as_list else None)


# -------------------------------------------------------------------------------------------------------- for all


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.float64, torch.complex64, torch.bfloat16])
metas = st.lists(
    st.builds(
        lambda shape, dtype, sparse: meta("p", *shape, dtype=dtype, sparse=sparse), shapes, dtypes, st.booleans()
    ),
    min_size=1,
    max_size=12,
)
caps = st.lists(st.integers(1, 20_000), min_size=1, max_size=3).map(lambda sizes: BucketCaps(tuple(sizes)))


@given(metas=metas, caps=caps, seed=st.integers(0, 1000))
def test_every_layout_is_sound(metas: list[ParamMeta], caps: BucketCaps, seed: int) -> None:
    order = list(range(len(metas)))
    random.Random(seed).shuffle(order)
    layout = plan_layout(metas, order, caps)
    assert sorted(layout.order) == sorted(order), "each parameter is placed once"
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    rank_in_order = {param: place for place, param in enumerate(order)}
    last_places = []
    closed: dict[torch.dtype, int] = {}
    for bucket in layout.buckets:
        members = [metas[slot.param] for slot in bucket.slots]
        assert {member.dtype for member in members} == {bucket.dtype}
        places = [rank_in_order[slot.param] for slot in bucket.slots]
        assert places == sorted(places), "gradients lie in the order in which they come"
        last_places.append(places[-1])
        assert all(slot.offset * bucket.dtype.itemsize % ALIGN_BYTES == 0 for slot in bucket.slots)
        assert all(slot.numel == member.numel for slot, member in zip(bucket.slots, members, strict=True))
        ends = [slot.offset + slot.numel for slot in bucket.slots]
        starts = [slot.offset for slot in bucket.slots]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "no two overlap"
        assert ends[-1] <= bucket.numel
        if bucket.sparse:
            assert len(members) == 1
            continue
        cap = caps.of(closed.get(bucket.dtype, 0))
        closed[bucket.dtype] = closed.get(bucket.dtype, 0) + 1
        assert sum(member.nbytes for member in members[:-1]) < cap, "it had not reached its cap before the last one"
    assert last_places == sorted(last_places), "buckets are numbered in the order in which they fill"
    dense_bytes = sum(member.nbytes for member in metas if not member.sparse)
    assert dense_bytes <= layout.nbytes <= dense_bytes + ALIGN_BYTES * len(metas)


@given(metas=metas, caps=caps)
def test_buckets_before_the_last_of_a_dtype_have_reached_their_caps(metas: list[ParamMeta], caps: BucketCaps) -> None:
    layout = plan_layout(metas, range(len(metas)), caps)
    dense = [bucket for bucket in layout.buckets if not bucket.sparse]
    for dtype in {bucket.dtype for bucket in dense}:
        own = [sum(metas[slot.param].nbytes for slot in bucket.slots) for bucket in dense if bucket.dtype == dtype]
        assert all(size >= caps.of(place) for place, size in enumerate(own[:-1]))
