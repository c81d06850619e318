"""One bucket: its states, its memory, and the gradients that are views of it."""

import pytest
import torch
from torch import nn

from paceline.collectives import LocalTransport
from paceline.errors import IllegalMove
from paceline.layout import BucketCaps, ParamMeta, plan_layout
from paceline.reducer.bucket import Bucket, BucketState, GradSlot
from paceline.reducer.buckets import BucketSet
from paceline.reducer.single_gradient import contribute_nothing_new
from paceline.reducer.sparse_bucket import SparseBucket
from paceline.reducer.unreduced import accumulate, lend

FILLING, FULL, LAUNCHED, REDUCED = BucketState


def meta_of(param: torch.Tensor, name: str = "p", *, sparse: bool = False) -> ParamMeta:
    return ParamMeta(name, tuple(param.shape), tuple(param.stride()), param.dtype, param.device, sparse)


def bucket_of(*params: torch.Tensor, sparse: bool = False) -> Bucket:
    metas = [meta_of(param, f"p{index}", sparse=sparse) for index, param in enumerate(params)]
    layout = plan_layout(metas, range(len(metas)), BucketCaps((1 << 30,)))
    slots = [GradSlot(index, meta, param) for index, (meta, param) in enumerate(zip(metas, params, strict=True))]
    (spec,) = layout.buckets
    if sparse:
        return SparseBucket(spec, slots[0])
    return Bucket(spec, slots, torch.zeros(spec.numel, dtype=spec.dtype))


def collect(bucket: Bucket, slot: GradSlot, scale: float) -> None:
    assert slot.param.grad is not None
    bucket.arrive(slot, scale)
    bucket.collect(scale)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


# ------------------------------------------------------------------------------------------------------------ states


@pytest.mark.parametrize("start", BucketState)
@pytest.mark.parametrize("end", BucketState)
def test_only_the_next_state_may_be_entered(start: BucketState, end: BucketState) -> None:
    bucket = bucket_of(param(2))
    bucket.state = start
    if (start, end) in {(FILLING, FULL), (FULL, LAUNCHED), (LAUNCHED, REDUCED), (REDUCED, FILLING)}:
        bucket.move(end)
        assert bucket.state is end
    else:
        with pytest.raises(IllegalMove, match=f"bucket 0 cannot go from {start.name} to {end.name}"):
            bucket.move(end)


def test_rearm_starts_again_from_anywhere() -> None:
    bucket = bucket_of(param(2), param(3))
    bucket.move(FULL)
    bucket.missing, bucket.skipped = 0, True
    bucket.rearm()
    assert (bucket.state, bucket.missing, bucket.skipped, bucket.flight) == (FILLING, 2, False, None)


# ------------------------------------------------------------------------------------------------------------- views


STRIDED = {
    "plain": torch.zeros(2, 3),
    "transposed": torch.zeros(3, 2).t(),
    "channels_last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0, 3),
    "ones": torch.zeros(1, 3, 1),
    "with gaps": torch.zeros(4, 6)[:, ::2],
    "expanded": torch.zeros(1, 3).expand(2, 3),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_view_has_the_shape_of_its_parameter_and_its_strides_where_they_are_dense(name: str) -> None:
    like = STRIDED[name]
    bucket = bucket_of(param(5), like, param(5))
    view = bucket.slots[1].view
    assert view.shape == like.shape
    assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
    if name not in {"with gaps", "expanded"}:
        assert view.stride() == like.stride()
    for slot in bucket.slots:
        slot.view.fill_(slot.index + 1)
    for slot in bucket.slots:
        assert (slot.view == slot.index + 1).all(), "views do not overlap"


def test_a_collected_gradient_is_in_the_bucket_alone() -> None:
    p = param(3)
    bucket = bucket_of(p)
    p.grad = torch.tensor([1.0, 2.0, 4.0])
    collect(bucket, bucket.slots[0], 0.5)
    assert p.grad is None
    assert bucket.slots[0].view.tolist() == [0.5, 1, 2]
    p.grad = torch.ones(3)  # a nested backward brings more
    collect(bucket, bucket.slots[0], 0.5)
    assert bucket.slots[0].view.tolist() == [1, 1.5, 2.5]
    bucket.publish_grads(bucket.slots[0], touched=True)
    assert bucket.slots[0].attached()


def test_an_attached_gradient_is_scaled_in_place() -> None:
    p = param(2)
    bucket = bucket_of(p)
    p.grad = bucket.slots[0].view
    p.grad.add_(4)
    collect(bucket, bucket.slots[0], 0.25)
    assert bucket.slots[0].view.tolist() == [1, 1]


def test_an_accumulated_gradient_stays_visible_and_moves_into_the_bucket() -> None:
    p = param(2)
    bucket = bucket_of(p)
    p.grad = torch.ones(2)
    bucket.arrive(bucket.slots[0], 1.0)
    accumulate(bucket)
    assert bucket.slots[0].attached()
    assert p.grad.tolist() == [1, 1]


def test_an_untouched_gradient_comes_back_as_it_was() -> None:
    for attached in (False, True):
        p, without = param(2), param(2)
        bucket = bucket_of(p, without)
        p.grad = torch.tensor([1.0, 3.0])
        if attached:
            bucket.arrive(bucket.slots[0], 1.0)
            accumulate(bucket)
        for slot in bucket.slots:
            contribute_nothing_new(slot, 0.1)
            slot.view.fill_(99)
            bucket.publish_grads(slot, touched=False)
        assert p.grad.tolist() == [1, 3]
        assert without.grad is None


def test_lending_contributes_zeros_and_keeps_the_gradient() -> None:
    p = param(2)
    bucket = bucket_of(p)
    p.grad = bucket.slots[0].view
    p.grad.fill_(5)
    lend(bucket.slots[0])
    assert bucket.flat[:2].tolist() == [0, 0]
    bucket.publish_grads(bucket.slots[0], touched=False)
    assert p.grad.tolist() == [5, 5]


def test_a_result_elsewhere_is_copied_into_the_bucket() -> None:
    bucket = bucket_of(param(2))
    address = bucket.flat.data_ptr()
    bucket.store_result(torch.full_like(bucket.flat, 3).double())
    assert bucket.flat.data_ptr() == address
    assert bucket.slots[0].view.tolist() == [3, 3]


def test_a_gradient_of_another_dtype_is_widened() -> None:
    p = param(2)
    bucket = bucket_of(p)
    p.data = p.data.half()
    p.grad = torch.tensor([1.0, 2.0], dtype=torch.float16)
    collect(bucket, bucket.slots[0], 0.5)
    assert bucket.flat.dtype is torch.float32
    assert bucket.slots[0].view.tolist() == [0.5, 1]


@pytest.mark.parametrize("declared_sparse", [False, True])
def test_a_gradient_of_the_wrong_layout_names_its_parameter(declared_sparse: bool) -> None:
    p = param(4, 2)
    bucket = bucket_of(p, sparse=declared_sparse)
    p.grad = torch.ones(4, 2) if declared_sparse else torch.ones(4, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="parameter p0 .* expected to have a (sparse|dense) gradient"):
        collect(bucket, bucket.slots[0], 1.0)


# ------------------------------------------------------------------------------------------------------- all buckets


def test_a_planned_layout_is_taken_up_with_the_gradients_in_it() -> None:
    params = [param(4), param(4)]
    metas = [meta_of(p, f"p{index}") for index, p in enumerate(params)]
    caps, local = BucketCaps((16,)), LocalTransport()
    buckets = BucketSet(params, plan_layout(metas, [0, 1], caps))
    buckets.allocate(local)
    slots = buckets.slots
    for index, slot in enumerate(slots):
        slot.param.grad = slot.view
        slot.view.fill_(index + 1)
    old = {slot.address for slot in slots}
    buckets.plan(plan_layout(metas, [1, 0], caps))
    assert buckets.relayout(local)
    assert buckets.layout.order == (1, 0)
    for index, slot in enumerate(slots):
        assert slot.attached()
        assert slot.address not in old
        assert slot.param.grad is not None
        assert slot.param.grad.tolist() == [index + 1] * 4
    assert not buckets.relayout(local), "once"


def test_the_same_layout_is_not_planned_again_and_held_gradients_stay() -> None:
    params = [param(4), param(4)]
    metas = [meta_of(p, f"p{index}") for index, p in enumerate(params)]
    caps, local = BucketCaps((16,)), LocalTransport()
    buckets = BucketSet(params, plan_layout(metas, [0, 1], caps))
    buckets.allocate(local)
    buckets.plan(plan_layout(metas, [0, 1], caps))
    assert not buckets.relayout(local)
    buckets.plan(plan_layout(metas, [1, 0], caps))
    buckets.slots[0].held = True
    assert not buckets.relayout(local)
    buckets.rearm()
    assert buckets.relayout(local)
