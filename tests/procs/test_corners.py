"""Corners where a step is left half-way, thrown away, or shared by replicas: the numbers of one process over the whole
batch, or an error on every rank."""

import _thread
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from paceline import Agreement
from paceline.errors import BackwardAborted, CollectiveMismatch, NotFiniteGradients, UsageError
from paceline.strategies.names import by_name
from tests.models import DDP, draw, mlp
from tests.pool import Pool

Case = Callable[[int, str], None]
NAN = float("nan")
WEIGHTS = (3.0, 5.0)
MADE: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the replicas of a rank


def net(seed: int = 0) -> nn.Sequential:
    return mlp(6, 16, 3, seed=seed)


def replica(module: nn.Module, transport: str, **options: Any) -> Any:
    made = DDP(module, transport=transport, timeout=20, **options)
    MADE.add(made)
    return made


def part(step: int, rank: int | None, seed: int = 0) -> torch.Tensor:
    """The batch of a rank, of two; None: of both."""
    whole = draw(100 * seed + step, 8, 6)
    return whole if rank is None else whole[4 * rank : 4 * rank + 4]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.square().mean()


def assert_grads(model: nn.Module, expected: nn.Module) -> None:
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def weighted_reference(*microbatches: tuple[int, tuple[float, float]]) -> nn.Module:
    """Gradients of a step of weighted microbatches: (step of the data, weight on each rank)."""
    whole = net()
    total = sum(sum(weights) for _, weights in microbatches)
    for step, weights in microbatches:
        for rank, weight in enumerate(weights):
            (loss(whole, part(step, rank)) * weight / total).backward()
    return whole


def plain_reference(*steps: int) -> nn.Module:
    whole = net()
    for step in steps:
        loss(whole, part(step, None)).backward()
    return whole


# ------------------------------------------------------------------------------------------------ several replicas


def shared_layer_in_two_orders(rank: int, transport: str) -> None:
    layer = mlp(6, 6)
    a, b = (replica(nn.Sequential(layer, mlp(6, width)), transport) for width in (3, 2))
    x = part(0, rank)
    outs = [a(x), b(x)] if rank == 0 else [b(x), a(x)]
    with pytest.raises(CollectiveMismatch, match="called them in different orders"):
        torch.cat(outs, 1).square().mean().backward()
    a.zero_grad(), b.zero_grad()
    whole = copy.deepcopy(nn.ModuleList([a.module, b.module]))
    torch.cat([a(x), b(x)], 1).sum().backward()
    torch.cat([half(part(0, None)) for half in whole], 1).sum().div(2).backward()
    assert_grads(nn.ModuleList([a.module, b.module]), whole)


def shared_layer_evaluated_on_one_rank(rank: int, transport: str) -> None:
    layer = mlp(6, 6)
    first, second = (nn.Sequential(layer, mlp(6, width)) for width in (3, 2))
    whole = copy.deepcopy(first)
    a, b = replica(first, transport), replica(second, transport)
    found = loss(a, part(0, rank))
    if rank == 0:
        with torch.no_grad():
            b(part(9, rank))
    found.backward()
    loss(whole, part(0, None)).backward()
    assert_grads(first, whole)


def gradients_of_a_failed_step_stay_away(rank: int, transport: str) -> None:
    """The replica that is settled first raises; those of the other one must not come back after zero_grad()."""
    b, a = replica(net(), transport), replica(net(1), transport, agreement=Agreement(not_finite="raise"))
    bad = part(0, rank).clone()
    bad[0, 0] = NAN if rank == 1 else 0.0
    with pytest.raises(NotFiniteGradients):
        (loss(b, part(0, rank)) + loss(a, bad)).backward()
    a.zero_grad(), b.zero_grad()
    (loss(a, part(1, rank)) + loss(b, part(1, rank))).backward()
    assert_grads(b, plain_reference(1))


def a_callback_of_the_user_raises(rank: int, transport: str) -> None:
    model = replica(net(), transport)

    def fail() -> None:
        raise ValueError("of the user")

    out = model(part(0, rank))
    out.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(fail))
    with pytest.raises(ValueError, match="of the user"):
        out.square().mean().backward()
    model.zero_grad()
    loss(model, part(1, rank)).backward()
    assert_grads(model, plain_reference(1))


def a_failure_in_one_replica_is_one_of_both(rank: int, transport: str) -> None:
    """On rank 1 backward fails in `a`, before it has come to `b`, for which rank 0 waits."""
    a, b = replica(net(1), transport), replica(net(), transport)
    failing: list[int] = []
    a.module[0].weight.register_hook(lambda grad: 1 / 0 if failing else grad)
    for step in range(4):
        failing[:] = [1] if rank == 1 and step == 1 else []
        total = loss(b, part(step, rank)) + loss(a, part(step, rank))
        if step == 1:
            with pytest.raises(ZeroDivisionError if rank == 1 else BackwardAborted):
                total.backward()
        else:
            total.backward()
            assert_grads(b, plain_reference(step))
        a.zero_grad(), b.zero_grad()


def a_failure_beside_a_replica_that_is_never_reduced(rank: int, transport: str) -> None:
    """The others wait for no backward of it, so none must be told to have failed."""
    teacher, model = replica(net(1), transport), replica(net(), transport)
    failing: list[int] = []
    model.module[0].weight.register_hook(lambda grad: 1 / 0 if failing else grad)
    for step in range(4):
        failing[:] = [1] if rank == 1 and step == 2 else []
        teacher(part(step, rank))
        total = loss(model, part(step, rank))
        if step == 2:
            with pytest.raises(ZeroDivisionError if rank == 1 else BackwardAborted):
                total.backward()
        else:
            total.backward()
            assert_grads(model, plain_reference(step))
        model.zero_grad()


# ------------------------------------------------------------------------------------- skipped and thrown away


def skipped_over_gradients_that_are_there(rank: int, transport: str) -> None:
    model, whole = replica(net(), transport), plain_reference(0)
    loss(model, part(0, rank)).backward()
    loss(model, part(1, 0)).backward() if rank == 0 else model.skip_batch()
    loss(whole, part(1, 0)).backward()
    assert_grads(model, whole)


def skipped_inside_no_sync(rank: int, transport: str) -> None:
    model, whole = replica(net(), transport), plain_reference(1)
    with model.no_sync():
        loss(model, part(0, rank)).backward() if rank == 0 else model.skip_batch()
    loss(model, part(1, rank)).backward()
    (loss(whole, part(0, 0)) / 2).backward()
    assert_grads(model, whole)


def skipped_after_a_failure(rank: int, transport: str) -> None:
    model, whole = replica(net(), transport), net()
    failing = [1] if rank else []
    model.module[0].weight.register_hook(lambda grad: 1 / 0 if failing else grad)
    try:
        with model.no_sync():
            loss(model, part(0, rank)).backward()
    except ZeroDivisionError:
        assert rank == 1
    model.zero_grad()
    loss(model, part(1, rank)).backward() if rank == 0 else model.skip_batch()
    loss(whole, part(1, 0)).backward()
    assert_grads(model, whole)


def weighted_then_zeroed_in_place(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with model.no_sync(), model.weight(3):
        loss(model, part(0, rank)).backward()
    model.zero_grad(set_to_none=False)
    with model.weight(2):
        loss(model, part(1, rank)).backward()
    assert_grads(model, weighted_reference((1, (2, 2))))


def weighted_then_zeroed_inside(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with model.weight(3):
        with model.no_sync():
            loss(model, part(0, rank)).backward()
        model.zero_grad()
        loss(model, part(1, rank)).backward()
    assert_grads(model, weighted_reference((1, (3, 3))))


def weighted_then_zeroed_in_a_lane(rank: int, transport: str) -> None:
    model = replica(net(), transport, lanes=2)
    for lane in model.lanes(list(model.own_lanes), 0):
        with model.no_sync(), model.weight(3):
            loss(model, part(0, lane)).backward()
        model.zero_grad()
        with model.weight(2):
            loss(model, part(1, lane)).backward()
    assert_grads(model, weighted_reference((1, (2, 2))))


def weighted_then_thrown_away_then_plain(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with model.no_sync(), model.weight(3):
        loss(model, part(0, rank)).backward()
    model.zero_grad()
    loss(model, part(1, rank)).backward()
    assert_grads(model, plain_reference(1))


def weighted_under_hooks_of_the_user(rank: int, transport: str) -> None:
    """Hooks that were added since run after ours: such gradients are weighted when they have run."""
    for options in ({}, {"overlap": False}):
        model = replica(net(), transport, **options)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: None)
        with model.no_sync(), model.weight(WEIGHTS[rank]):
            loss(model, part(0, rank)).backward()
        model.sync_gradients()
        assert_grads(model, weighted_reference((0, WEIGHTS)))
    model = replica(net(), transport)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    with model.no_sync(), model.weight(WEIGHTS[rank]):
        loss(model, part(0, rank)).backward()
    with model.weight(2):
        loss(model, part(1, rank)).backward()
    assert_grads(model, weighted_reference((0, WEIGHTS), (1, (2, 2))))


def weighted_past_the_replica(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with model.weight(3):
        with model.no_sync():
            loss(model, part(0, rank)).backward()
        with pytest.raises(UsageError, match="call the replica itself"):
            loss(model.module, part(1, rank)).backward()


def weighted_and_replaced(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with model.weight(3):
        with model.no_sync():
            loss(model, part(0, rank)).backward()
        for param in model.parameters():
            param.grad = param.grad * 2
        with pytest.raises(UsageError, match="was replaced"):
            loss(model, part(1, rank)).backward()


def set_by_hand_after_a_reduction(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    loss(model, part(0, rank)).backward()
    for param in model.parameters():
        param.grad = torch.full_like(param, float(rank + 1))
    model.sync_gradients()
    assert all(param.grad.eq(1.5).all() for param in model.parameters())


def set_by_hand_and_sparse(rank: int, transport: str) -> None:
    model = replica(nn.Embedding(4, 2, sparse=True), transport)
    rows = torch.tensor([[rank]])
    values = torch.full((1, 2), 2.0)
    model.module.weight.grad = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
    model.sync_gradients()
    assert model.module.weight.grad.to_dense().tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def set_to_another_look_at_the_bucket(rank: int, transport: str) -> None:
    """The transpose of a gradient lies in the memory that it is to be copied to."""
    model = replica(nn.Linear(5, 5, bias=False), transport)
    weight = model.module.weight
    with model.no_sync():
        (model(torch.eye(5)) * torch.arange(25.0).view(5, 5) * (rank + 1)).sum().backward()
    weight.grad = weight.grad.t()
    model.sync_gradients()
    assert torch.equal(weight.grad, 1.5 * torch.arange(25.0).view(5, 5))


# -------------------------------------------------------------------------------- late, not finite, threads, modes


class Twice(nn.Module):
    """A layer in two reentrant checkpoints: its second gradient comes when its bucket has left. `spoilt`: as NaN."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.layer, self.head = mlp(6, 6), mlp(6, 3)
        self.nested, self.spoilt = nested, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.nested:
            return self.head(self.layer(self.layer(x).tanh()).tanh())  # type: ignore[no-any-return]
        x = checkpoint(lambda y: self.layer(y).tanh(), x.clone().requires_grad_(), use_reentrant=True)
        if self.spoilt:
            x.register_hook(lambda grad: grad * NAN)
        return self.head(checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=True))  # type: ignore[no-any-return]


def late_and_not_finite(rank: int, transport: str) -> None:
    model = replica(Twice(nested=True), transport, agreement=Agreement(not_finite="skip"), bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.spoilt = rank == 1
    loss(model, part(0, rank)).backward()
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def late_and_without_weight(rank: int, transport: str) -> None:
    model, whole = replica(Twice(nested=True), transport, bucket_cap_mb=1e-5), Twice(nested=False)
    model.module.spoilt = rank == 1
    with model.weight(0 if rank == 1 else 3):
        loss(model, part(0, rank)).backward()
    loss(whole, part(0, 0)).backward()
    assert_grads(model, whole)


def not_finite_in_a_compressed_reduction(rank: int, transport: str) -> None:
    for name in ("topk", "powersgd"):
        model = replica(net(), transport, reduction=by_name(name), agreement=Agreement(not_finite="skip"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = part(step, rank).clone()
            x[0, 0] = NAN if rank and step == 1 else 0.0
            loss(model, x).backward()
            optimizer.step(), optimizer.zero_grad()
            assert all(param.isfinite().all() for param in model.parameters()), (name, step)


def not_finite_with_a_communication_hook(rank: int, transport: str) -> None:
    model = replica(net(), transport, agreement=Agreement(not_finite="raise"))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    x = part(0, rank).clone()
    x[0, 0] = NAN if rank else 0.0
    with pytest.raises(NotFiniteGradients, match="by the batch of rank 1"):
        loss(model, x).backward()


def _in_two_threads(model: Any, rank: int, forward: Any, start: Callable[[Any, torch.Tensor], object]) -> None:
    """Right, or an error that names threads."""
    for step in range(6):
        model.zero_grad()
        errors: list[Exception] = []
        over = threading.Semaphore(0)

        def run(found: torch.Tensor, errors: list[Exception] = errors, over: Any = over) -> None:
            try:
                found.backward()
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)
            over.release()

        for found in [forward(model, part(step, rank, seed)).square().mean() for seed in range(2)]:
            start(run, found)
        over.acquire(), over.acquire()
        if errors:
            assert all("thread" in str(raised) for raised in errors)  # none waits for a rank that has given up
            return
        whole = net()
        for seed in range(2):
            loss(whole, part(step, None, seed)).backward()
        assert_grads(model, whole)


def two_threads_that_nest(rank: int, transport: str) -> None:
    def forward(model: Any, x: torch.Tensor) -> Any:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)

    def start(run: Any, found: torch.Tensor) -> None:
        threading.Thread(target=run, args=(found,)).start()

    _in_two_threads(replica(net(), transport), rank, forward, start)


def two_threads_that_python_does_not_know(rank: int, transport: str) -> None:
    _in_two_threads(
        replica(net(), transport), rank, lambda m, x: m(x), lambda run, found: _thread.start_new_thread(run, (found,))
    )


def a_first_backward_on_fakes(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    with pytest.raises(UsageError, match="FakeTensorMode"), FakeTensorMode(allow_non_fake_inputs=True):
        loss(model, torch.randn(4, 6)).backward()
    model.zero_grad()
    loss(model, part(1, rank)).backward()
    assert_grads(model, plain_reference(1))


def a_copy_that_one_rank_evaluates(rank: int, transport: str) -> None:
    model = replica(net(), transport)
    loss(model, part(0, rank)).backward()
    if rank == 0:
        x = part(0, 0).clone().requires_grad_()
        torch.autograd.grad(loss(copy.deepcopy(model).eval(), x), x)
    model.zero_grad()
    loss(model, part(1, rank)).backward()
    assert_grads(model, plain_reference(1))


CASES: list[Case] = [
    shared_layer_in_two_orders,
    shared_layer_evaluated_on_one_rank,
    gradients_of_a_failed_step_stay_away,
    a_callback_of_the_user_raises,
    a_failure_in_one_replica_is_one_of_both,
    a_failure_beside_a_replica_that_is_never_reduced,
    skipped_over_gradients_that_are_there,
    skipped_inside_no_sync,
    skipped_after_a_failure,
    weighted_then_zeroed_in_place,
    weighted_then_zeroed_inside,
    weighted_then_zeroed_in_a_lane,
    weighted_then_thrown_away_then_plain,
    weighted_under_hooks_of_the_user,
    weighted_past_the_replica,
    weighted_and_replaced,
    set_by_hand_after_a_reduction,
    set_by_hand_and_sparse,
    set_to_another_look_at_the_bucket,
    late_and_not_finite,
    late_and_without_weight,
    not_finite_in_a_compressed_reduction,
    not_finite_with_a_communication_hook,
    two_threads_that_nest,
    two_threads_that_python_does_not_know,
    a_first_backward_on_fakes,
    a_copy_that_one_rank_evaluates,
]


def run_case(rank: int, size: int, number: int, transport: str) -> None:
    CASES[number](rank, transport)
    # torch notes here whose forward runs. Two threads that come out of theirs in turn leave it behind, and it is kept.
    nn.parallel.DistributedDataParallel._active_ddp_module = None
    gc.collect()
    assert not list(MADE), "what was raised, or a graph, keeps a replica alive"


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_corner(procs: Pool, case: Case, transport: str) -> None:
    procs(2).run(run_case, CASES.index(case), transport)
