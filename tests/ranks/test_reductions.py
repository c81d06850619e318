"""Reductions other than the mean, against formulas in one process; all ranks have equal bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.collectives import LocalTransport, Op, Transport, Work, finish
from paceline.collectives.protocols import Traits
from paceline.collectives.reduction import GradBucket, Mean
from paceline.collectives.reduction_protocol import Reduction
from paceline.collectives.threads import run
from paceline.collectives.tree_sum import tree_sum
from paceline.errors import PeerLost, UsageError
from paceline.layout import BucketCaps, ParamMeta, plan_layout
from paceline.strategies.cast import Wide, Wire
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.names import NAMES, by_name
from paceline.strategies.power_sgd import PowerSGD
from paceline.strategies.top_k import TopK
from tests.models import DDP, GPT, Grads, assert_same_bits, draw, grads, mlp, seeded, tokens, values

Tensors = list[torch.Tensor]


def reduce(
    reduction: Reduction, transport: Transport, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> Tensors:
    """One bucket with `gradients`, as the reducer would send it, and what comes back."""
    metas = [ParamMeta(f"p{n}", tuple(g.shape), tuple(g.stride()), g.dtype, g.device) for n, g in enumerate(gradients)]
    (spec,) = plan_layout(metas, range(len(metas)), BucketCaps((2**60,))).buckets
    flat = torch.zeros(spec.numel, dtype=spec.dtype)
    views = [flat.as_strided(g.shape, g.stride(), slot.offset) for g, slot in zip(gradients, spec.slots, strict=True)]
    scale = 1.0 if reduction.divides(transport, flat.device) else 1.0 / transport.size
    for view, gradient in zip(views, gradients, strict=True):
        view.copy_(gradient * scale)
    flight = reduction(GradBucket(0, flat, views, params, last=True), transport)
    finish(flight.work, what="a bucket", watch=transport.watch, timeout_s=20)
    result = flight.result()
    if result is not None:
        flat.copy_(result)
    return [view.clone() for view in views]


def params_like(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def on_ranks(size: int, body: Callable[[Transport], Tensors]) -> Tensors:
    """What `body` returns, which is the same on all ranks, bit for bit."""
    results = run(body, size)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


# ---- fixed order

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def rough(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes, so that every order of additions has its own bits."""
    return (draw(seed, *shape) * 10 ** draw(seed + 1, *shape)).to(dtype)


def ordered_mean(seeds: Sequence[int], *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return (tree_sum([rough(seed, *shape, dtype=dtype).to(wide) for seed in seeds]) / len(seeds)).to(dtype)


@settings(max_examples=40)
@given(
    size=st.integers(1, 7),
    numel=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_order_is_that_of_the_tree(size: int, numel: int, dtype: torch.dtype, seed: int) -> None:
    def body(transport: Transport) -> Tensors:
        own = rough(seed + 10 * transport.rank, numel, dtype=dtype)
        return reduce(FixedOrder(), transport, params_like((numel,)), [own])

    (got,) = on_ranks(size, body)
    assert torch.equal(got, ordered_mean([seed + 10 * rank for rank in range(size)], numel, dtype=dtype))


def test_the_bits_do_not_depend_on_buckets() -> None:
    def body(transport: Transport) -> list[Grads]:
        found = []
        for cap in (1e-6, 1e-3, 25):
            model = DDP(mlp(7, 13, 5), transport=transport, reduction=FixedOrder(), bucket_cap_mb=cap)
            model(draw(transport.rank, 3, 7)).sum().backward()
            found.append(grads(model))
        return found

    results = run(body, 3)
    for found in results:
        for got in found:
            assert_same_bits(got, results[0][0])


def test_a_sum_beyond_float16_has_a_mean() -> None:
    def body(transport: Transport) -> Tensors:
        own = torch.full((5,), 60000.0, dtype=torch.float16)
        return reduce(FixedOrder(), transport, params_like((5,)), [own])

    assert torch.equal(on_ranks(4, body)[0], torch.full((5,), 60000.0, dtype=torch.float16))


@pytest.mark.parametrize("nothing", [False, True])
def test_rows_of_sparse_gradients_are_added_in_order_too(nothing: bool) -> None:
    def rows_of(rank: int) -> torch.Tensor:
        rows = torch.tensor([[]] if nothing or rank == 1 else [[rank, 3, rank, 7]], dtype=torch.int64)
        shape = rows.shape[1], 2
        return torch.sparse_coo_tensor(rows, rough(rank, *shape), (9, 2), check_invariants=False)

    def body(transport: Transport) -> Tensors:
        own = rows_of(transport.rank)
        flight = FixedOrder()(GradBucket(0, own, [own], params_like((9, 2)), last=True), transport)
        finish(flight.work, what="a bucket", watch=transport.watch, timeout_s=20)
        result = flight.result()
        assert result is not None and result.is_sparse
        return [result.to_dense()]

    expected = tree_sum([rows_of(rank).coalesce().to_dense() for rank in range(3)]) / 3
    assert torch.equal(on_ranks(3, body)[0], expected)


# ---- other types on the wire


def test_narrow_gradients_are_added_wide_and_rounded_once() -> None:
    def body(transport: Transport) -> Tensors:
        return reduce(Wide(), transport, params_like((100,)), [draw(transport.rank, 100).bfloat16()])

    total = torch.stack([draw(rank, 100).bfloat16().float() for rank in range(3)]).sum(0)
    assert torch.equal(on_ranks(3, body)[0], (total / 3).bfloat16())


def test_wide_never_narrows() -> None:
    def body(transport: Transport) -> Tensors:
        return reduce(Wide(), transport, params_like((100,)), [draw(transport.rank, 100).double() / 3])

    assert torch.equal(on_ranks(2, body)[0], (draw(0, 100).double() / 3 + draw(1, 100).double() / 3) / 2)


class Averaging(LocalTransport):
    """Says that the mean is free, and writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Op, torch.dtype]] = []

    def traits(self, device: torch.device) -> Traits:
        return replace(super().traits(device), native_mean=True)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        self.asked.append((op, flat.dtype))
        return super().all_reduce(flat, op)


@pytest.mark.parametrize(
    ("reduction", "divides", "op", "dtype"),
    [
        (Mean(), True, Op.MEAN, torch.float32),
        (Wire(torch.bfloat16), True, Op.MEAN, torch.bfloat16),
        (Wire(torch.float16), False, Op.SUM, torch.float16),
        (Wide(torch.float64), True, Op.MEAN, torch.float64),
    ],
    ids=str,
)
def test_who_divides_where_the_mean_is_free(reduction: Reduction, divides: bool, op: Op, dtype: torch.dtype) -> None:
    transport = Averaging()
    assert reduction.divides(transport, torch.device("cpu")) is divides
    reduce(reduction, transport, params_like((4,)), [torch.ones(4)])
    assert transport.asked == [(op, dtype)]


def test_float16_on_the_wire_does_not_overflow_before_it_is_divided() -> None:
    def body(transport: Transport) -> Tensors:
        return reduce(Wire(torch.float16), transport, params_like((2,)), [torch.full((2,), 60000.0)])

    assert torch.equal(on_ranks(4, body)[0], torch.full((2,), 60000.0))


# ---- top-k


def largest(full: torch.Tensor, count: int) -> torch.Tensor:
    keep = torch.zeros_like(full)
    indices = full.abs().topk(count).indices
    keep[indices] = full[indices]
    return keep


def test_the_largest_entries_are_sent_and_the_rest_is_added_later() -> None:
    steps = range(4)

    def body(transport: Transport) -> Tensors:
        reduction, params = TopK(0.25), params_like((20,))
        return [reduce(reduction, transport, params, [draw(7 * s + transport.rank, 20)])[0] for s in steps]

    got = on_ranks(3, body)
    left = [torch.zeros(20) for _ in range(3)]
    for step in steps:
        sent = []
        for rank in range(3):
            full = draw(7 * step + rank, 20) + left[rank]
            sent.append(largest(full, 5))
            left[rank] = full - sent[-1]
        assert torch.equal(got[step], (sent[0] + sent[1] + sent[2]) / 3)


def test_all_entries_are_the_mean_in_rank_order() -> None:
    def body(transport: Transport) -> Tensors:
        return reduce(TopK(1.0), transport, params_like((5, 7)), [draw(transport.rank, 5, 7)])

    assert torch.equal(on_ranks(3, body)[0], (draw(0, 5, 7) + draw(1, 5, 7) + draw(2, 5, 7)) / 3)


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).float()


SHAPES = [(4, 3), (5,), (2, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_is_lost_also_when_buckets_change(dtype: torch.dtype) -> None:
    """Of whole numbers: what has come out, and what is remembered, is what has gone in, exactly."""

    def body(transport: Transport) -> Tensors:
        reduction, params = TopK(0.1), params_like(*SHAPES)
        params[0].data = params[0].data.t()  # a gradient that is not contiguous
        entered, left = [torch.zeros(s) for s in SHAPES], [torch.zeros(s) for s in SHAPES]
        layouts = [[[0, 1, 2]], [[2], [0, 1]], [[0], [1], [2]], [[1, 2, 0]]]
        for step, layout in enumerate(layouts * 2):
            for group in layout:
                own = [whole_numbers(100 * step + 10 * p + transport.rank, *SHAPES[p]).to(dtype) for p in group]
                own = [g.t().contiguous().t() if g.dim() == 2 else g for g in own]
                out = reduce(reduction, transport, [params[p] for p in group], own)
                for p, gradient, result in zip(group, own, out, strict=True):
                    entered[p] += gradient.float()
                    left[p] += result.float() * transport.size
        for p, param in enumerate(params):
            remembered = reduction.memory.get(param)
            assert remembered is not None
            assert remembered.dtype is torch.promote_types(dtype, torch.float32)
            total = torch.stack([entered[p], remembered.float()])
            finish(transport.all_reduce(total), what="the books", watch=transport.watch)
            assert torch.equal(total[0], left[p] + total[1])
        return left

    on_ranks(2, body)


def test_without_feedback_nothing_is_remembered() -> None:
    def body(transport: Transport) -> Tensors:
        reduction, params = TopK(0.25, error_feedback=False), params_like((20,))
        both = [reduce(reduction, transport, params, [draw(transport.rank, 20)])[0] for _ in range(2)]
        assert torch.equal(*both) and not len(reduction.memory)
        return both

    on_ranks(2, body)


# ---- PowerSGD


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    q: torch.Tensor = torch.linalg.qr(matrix).Q
    return q


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_the_product_is_the_projection_of_the_mean_and_the_rest_is_remembered(rank: int) -> None:
    """With columns P of an orthonormal basis of (mean of M) Q, the result is P Pᵀ (mean of M)."""
    size, shape = 3, (24, 20)

    def body(transport: Transport) -> Tensors:
        reduction, params = PowerSGD(rank, start_step=0, min_compression=1.0), params_like(shape, (5,))
        rest, results = torch.zeros(shape), []
        for step in range(3):
            before = reduction.memory.get(params[0])
            q = None if before is None else before.q
            gradient = draw(10 * step + transport.rank, *shape)
            matrix, vector = reduce(reduction, transport, params, [gradient, draw(step + transport.rank, 5)])
            mean = (gradient + rest).clone()
            finish(transport.all_reduce(mean, Op.MEAN), what="the mean", watch=transport.watch)
            if q is not None:
                p = orthonormal(mean @ orthonormal(q))
                assert torch.allclose(matrix, p @ (p.T @ mean), atol=1e-4)
            assert torch.linalg.matrix_rank(matrix) == rank
            rest = gradient + rest - matrix
            known = reduction.memory.get(params[0])
            assert known is not None and known.error is not None
            assert torch.allclose(known.error, rest, atol=1e-5)
            results += [matrix, vector]
        return results

    results = on_ranks(size, body)
    for step in range(3):
        expected = (draw(step, 5) + draw(step + 1, 5) + draw(step + 2, 5)) / 3
        assert torch.allclose(results[2 * step + 1], expected, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_warm_start_leads_to_the_best_matrix_of_its_rank(rank: int) -> None:
    def body(transport: Transport) -> Tensors:
        reduction = PowerSGD(rank, start_step=0, error_feedback=False, min_compression=1.0)
        params, own = params_like((16, 12)), draw(transport.rank, 16, 12)
        for _ in range(60):
            (got,) = reduce(reduction, transport, params, [own])
        return [got]

    (got,) = on_ranks(2, body)
    u, s, vh = torch.linalg.svd((draw(0, 16, 12) + draw(1, 16, 12)) / 2)
    assert torch.allclose(got, u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank], atol=0.02)


def test_the_first_steps_are_plain_and_vectors_always_are() -> None:
    def body(transport: Transport) -> Tensors:
        reduction, params, own = PowerSGD(start_step=2), params_like((30, 30), (3,)), draw(transport.rank, 30, 30)
        steps = [reduce(reduction, transport, params, [own, own[0, :3]]) for _ in range(3)]
        known = reduction.memory.get(params[1])
        assert known is not None and known.error is None
        return [tensor for step in steps for tensor in step]

    mean = (draw(0, 30, 30) + draw(1, 30, 30)) / 2
    first, vector1, second, vector2, third, vector3 = on_ranks(2, body)
    assert torch.equal(first, mean) and torch.equal(second, mean) and not torch.equal(third, mean)
    assert all(torch.equal(vector, mean[0, :3]) for vector in (vector1, vector2, vector3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_left_out_is_remembered_across_buckets(dtype: torch.dtype) -> None:
    """Of what went in: the sum of results and the mean of what is remembered, up to rounding."""
    shapes = [(20, 16), (20, 16), (3, 4, 30)]

    def body(transport: Transport) -> Tensors:
        reduction, params = PowerSGD(start_step=1), params_like(*shapes)
        entered, left = [torch.zeros(s) for s in shapes], [torch.zeros(s) for s in shapes]
        for step, layout in enumerate([[[0, 1, 2]], [[2, 0], [1]], [[0], [1], [2]], [[1, 2, 0]]] * 2):
            for group in layout:
                own = [draw(100 * step + 10 * p + transport.rank, *shapes[p]).to(dtype) for p in group]
                out = reduce(reduction, transport, [params[p] for p in group], own)
                for p, gradient, result in zip(group, own, out, strict=True):
                    entered[p] += gradient.float()
                    left[p] += result.float()
        for p, param in enumerate(params):
            known = reduction.memory.get(param)
            assert known is not None and known.error is not None and known.steps == 8
            total = torch.stack([entered[p], known.error.float().view(shapes[p])])
            finish(transport.all_reduce(total, Op.MEAN), what="the books", watch=transport.watch)
            tolerance = 0.05 if dtype is torch.bfloat16 else 1e-4  # of the first step, which is a mean in bfloat16
            assert torch.allclose(total[0], left[p] + total[1], atol=tolerance)
        return left

    on_ranks(2, body)


def test_random_matrices_are_new_in_each_step_without_a_warm_start_and_leave_the_users_numbers_alone() -> None:
    def body(transport: Transport) -> Tensors:
        reduction = PowerSGD(start_step=0, warm_start=False, error_feedback=False)
        params, own = params_like((30, 30)), draw(0, 30, 30)
        first, second = (reduce(reduction, transport, params, [own])[0] for _ in range(2))
        assert not torch.equal(first, second)
        return [first, second]

    state = torch.get_rng_state()
    on_ranks(2, body)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rank", [1, 2, 6])
def test_a_parameter_without_gradients_is_heard_later(rank: int) -> None:
    def body(transport: Transport) -> Tensors:
        reduction, params = PowerSGD(rank, start_step=0), params_like((40, 40))
        for _ in range(2):
            (none,) = reduce(reduction, transport, params, [torch.zeros(40, 40)])
            assert not none.any()
        direction = torch.outer(draw(1, 40), draw(2, 40)) * 1e-20  # small, and of rank 1
        return reduce(reduction, transport, params, [direction])

    (got,) = on_ranks(2, body)
    assert torch.allclose(got * 1e20, torch.outer(draw(1, 40), draw(2, 40)), atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [lambda: PowerSGD(start_step=0), lambda: PowerSGD(6, start_step=0), TopK])
def test_a_gradient_that_is_not_finite_shows_everywhere_and_spoils_no_later_step(
    make: Callable[[], Reduction], bad: float
) -> None:
    def body(transport: Transport) -> Tensors:
        reduction, params = make(), params_like((30, 40))
        spoiled = draw(transport.rank, 30, 40)
        if transport.rank == 1:
            spoiled[3, 4] = bad
        (first,) = reduce(reduction, transport, params, [spoiled])
        assert not torch.isfinite(first).all()
        (second,) = reduce(reduction, transport, params, [draw(transport.rank, 30, 40)])
        assert torch.isfinite(second).all() and second.any()
        return [second]

    on_ranks(2, body)


def test_what_is_known_can_be_forgotten() -> None:
    for reduction in (PowerSGD(start_step=0), TopK()):
        params = params_like((30, 30))
        (first,) = reduce(reduction, LocalTransport(), params, [draw(0, 30, 30)])
        (second,) = reduce(reduction, LocalTransport(), params, [draw(0, 30, 30)])
        assert not torch.equal(first, second)
        reduction.forget()
        (again,) = reduce(reduction, LocalTransport(), params, [draw(0, 30, 30)])
        assert torch.equal(first, again)


class InterruptedOnce:
    """A collective during whose first wait, which lasts until it is complete, Ctrl-C comes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._interrupted = False

    def done(self) -> bool:
        return self._interrupted and self._work.done()

    def wait(self, seconds: float) -> bool:
        if not self._interrupted and seconds > 0:
            assert self._work.wait(20)
            self._interrupted = True
            raise KeyboardInterrupt
        return self._work.wait(seconds)


def test_after_an_interrupt_a_reduction_starts_no_further_collective() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 4, 2), transport=transport, reduction=FixedOrder(), timeout=20)
        own = model._core.transport
        if transport.rank:
            with pytest.raises(PeerLost):
                model(draw(1, 4, 3)).sum().backward()
            return
        all_to_all, before = own.all_to_all, own._started
        own.all_to_all = lambda out, flat: InterruptedOnce(all_to_all(out, flat))
        with pytest.raises(KeyboardInterrupt):
            model(draw(0, 4, 3)).sum().backward()
        assert own._started == before + 1

    run(body, 2)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: PowerSGD(rank=0), "rank=0"),
        (lambda: PowerSGD(start_step=-1), "start_step=-1"),
        (lambda: PowerSGD(min_compression=0), "min_compression=0"),
        (lambda: TopK(0.0), "got 0.0"),
        (lambda: TopK(1.5), "got 1.5"),
        (lambda: by_name("median"), "one of mean, bf16, fp16, fp32, powersgd, topk, fixed-order; got 'median'"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Reduction], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()


# ---- in training


class Mixed(nn.Module):
    """A matrix, vectors, a sparse embedding, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 24, sparse=True)
        self.body = mlp(24, 32, 24)
        self.seldom = mlp(24, 24)

    def forward(self, ids: torch.Tensor, *, all_layers: bool) -> torch.Tensor:
        x: torch.Tensor = self.body(self.words(ids))
        x = self.seldom(x) if all_layers else x
        return x.square().mean()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_every_reduction_trains_any_model_alike_on_all_ranks(name: str, size: int) -> None:
    def body(transport: Transport) -> Any:
        reduction = PowerSGD(start_step=1) if name == "powersgd" else by_name(name)
        model = DDP(seeded(Mixed()), transport=transport, reduction=reduction, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(4):
            ids = torch.arange(4) + 3 * transport.rank
            with model.no_sync():
                model(ids, all_layers=True).backward()
            loss = model(ids, all_layers=transport.rank == 0)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return values(model), losses

    results = run(body, size)
    for state, losses in results:
        assert_same_bits(state, results[0][0])
        assert losses[3] < losses[0]


def test_words_may_weigh_differently_in_every_reduction() -> None:
    def body(transport: Transport) -> list[Grads]:
        found = []
        for name in ("mean", "fixed-order", "fp32", "topk", "powersgd"):
            reduction = TopK(1.0) if name == "topk" else by_name(name)
            model = DDP(mlp(3, 4), transport=transport, reduction=reduction)
            with model.weight(1 + 2 * transport.rank):
                model(draw(transport.rank, 2, 3)).sum().backward()
            found.append(grads(model))
        return found

    for found in run(body, 2):
        for got in found[1:]:
            for name, grad in got.items():
                plain = found[0][name]
                assert grad is not None and plain is not None
                assert torch.allclose(grad, plain, atol=1e-6)


def final_loss(reduction: Callable[[], Reduction | None], steps: int = 80) -> float:
    def body(transport: Transport) -> float:
        # Which entries of a bucket are the largest depends on its bounds, and a plan of them on measured times.
        model = DDP(GPT(width=32, depth=1), transport=transport, reduction=reduction(), bucket_plan="fixed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(tokens(2 * step + transport.rank, 8, 16))
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return float(model(tokens(10_000, 32, 16)))

    return run(body, 2)[0]


def test_compressed_training_ends_close_to_plain_training() -> None:
    plain = final_loss(lambda: None)
    start = final_loss(lambda: None, steps=0)
    reached = {
        "powersgd": final_loss(lambda: PowerSGD(2, start_step=5)),
        "topk": final_loss(lambda: TopK(0.05)),
    }
    for name, loss in reached.items():
        assert loss < plain + 0.1 * (start - plain), f"{name}: {loss}, plain: {plain}, at the start: {start}"
