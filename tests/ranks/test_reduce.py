"""Gradients become the mean over all ranks, whoever calls what, and live in their buckets."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import LocalTransport, Transport
from paceline.collectives.threads import run
from paceline.trace import Moment
from tests.models import DDP, Branches, Grads, assert_close, assert_same_bits, draw, grads, mean_grads, mlp, values

ONE_EACH = 1e-6  # MiB: a bucket per parameter


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return draw(100 * step + rank, 2, 3)


def storages(model: nn.Module) -> dict[int, int]:
    """Address and bytes of every piece of memory that gradients live in."""
    found = [param.grad.untyped_storage() for param in model.parameters() if param.grad is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


# ------------------------------------------------------------------------------------------------ the mean, however


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the replica": lambda model, x: model(x),
    "the replica, by keyword": lambda model, x: model(x=x),
    "the module": lambda model, x: model.module(x),
    "another method": lambda model, x: model.module.other_way(x) / 2,
    "a submodule chain": lambda model, x: model.module.b(model.module.a(model.module.t(x).tanh()).tanh()).tanh(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_the_mean(way: str, size: int) -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Branches(), transport=transport)
        WAYS[way](model, batch(transport.rank)).square().sum().backward()
        return grads(model)

    expected = mean_grads(Branches(), lambda module, rank: module(batch(rank)).square().sum(), size)
    for got in run(body, size):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("cap", [None, 25, ONE_EACH])
def test_training_equals_training_on_the_whole_batch(cap: float | None) -> None:
    def train(model: nn.Module, data: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            optimizer.step()
        return values(model)

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 5, 4, 2), transport=transport, bucket_cap_mb=cap)
        return train(model, lambda step: batch(transport.rank, step))

    whole = train(mlp(3, 5, 4, 2), lambda step: torch.cat([batch(rank, step) for rank in range(3)]))
    results = run(body, 3)
    assert_close(dict(results[0]), dict(whole))
    for other in results[1:]:
        assert_same_bits(dict(other), dict(results[0]))


def test_an_existing_gradient_takes_part_in_the_mean() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 2), transport=transport)
        for param in model.parameters():
            param.grad = torch.full_like(param, float(transport.rank))
        model(batch(0)).sum().backward()
        return grads(model)

    alone = mlp(3, 2)
    alone(batch(0)).sum().backward()
    for got in run(body, 2):
        assert_close(got, {name: None if grad is None else grad + 0.5 for name, grad in grads(alone).items()})


def test_the_first_backward_may_come_from_a_replica_that_was_never_called() -> None:
    def body(transport: Transport) -> float:
        model = DDP(nn.Linear(1, 1), transport=transport)
        (model.module.weight * (transport.rank + 1)).sum().backward()
        return float(model.module.weight.grad)

    assert run(body, 2) == [1.5, 1.5]


# ----------------------------------------------------------------------------------------------------- transparency


def test_a_replica_computes_and_looks_like_its_module() -> None:
    def body(transport: Transport) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        model = DDP(module, transport=transport)
        assert model.module is module
        assert model.train() is model
        assert module.training
        assert model.eval() is model
        assert not module.training
        x = batch(transport.rank)
        assert torch.equal(model(x), module(x))
        assert list(model.state_dict()) == ["module.0.weight", "module.0.bias"]
        assert [name for name, _ in model.named_parameters()] == ["module.0.weight", "module.0.bias"]
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        assert (module[0].weight == 1).all()
        assert isinstance(model, nn.parallel.DistributedDataParallel)

    run(body, 2)


def test_eval_without_gradients_needs_no_other_rank() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        if transport.rank == 0:
            model.eval()
            with torch.no_grad():
                model(batch(0))
            model.train()
        model(batch(transport.rank)).sum().backward()

    run(body, 2)


def test_a_copy_of_the_module_is_on_its_own() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 2), transport=transport)
        model(batch(9)).sum().backward()
        twin = copy.deepcopy(model.module)
        twin.zero_grad()
        twin(batch(transport.rank)).sum().backward()
        return grads(twin)

    for rank, got in enumerate(run(body, 2)):
        alone = mlp(3, 2)
        alone(batch(rank)).sum().backward()
        assert_same_bits(got, grads(alone))


def test_an_optimizer_built_before_wrapping_works() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = mlp(3, 2, seed=transport.rank)
        optimizer = torch.optim.Adam(module.parameters())
        model = DDP(module, transport=transport)
        model(batch(transport.rank)).sum().backward()
        optimizer.step()
        return values(model)

    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))


# ------------------------------------------------------------------------------------------------ where gradients live


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_views_of_their_buckets_and_there_is_no_second_copy(set_to_none: bool, overlap: bool) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 5, 4, 2), transport=transport, bucket_cap_mb=1e-4, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        homes = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(batch(transport.rank, step)).sum().backward()
            model.sync_gradients()
            homes.append(storages(model))
            optimizer.step()
        assert len(model._core.bucket_set.layout.buckets) > 1
        assert len(homes[-1]) == 1, "all buckets are cut from one piece of memory"
        assert sum(homes[-1].values()) == model._core.bucket_set.layout.nbytes
        assert homes[2] == homes[3], "the views are attached again, to the same memory"

    run(body, 2)


def test_a_world_of_one_needs_no_buckets_and_leaves_gradients_where_autograd_put_them() -> None:
    model = DDP(mlp(3, 5, 4, 2), transport=LocalTransport())
    plain = mlp(3, 5, 4, 2)
    plain.load_state_dict(model.module.state_dict())
    for step in range(3):
        for net in (model, plain):
            net(batch(0, step)).sum().backward()
        assert not model._core.bucket_set.allocated
        assert len(storages(model)) == 6
        assert model._core.step_state.reductions_since_step == step + 1
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    model.zero_grad()
    with model.weight(3.0):
        model(batch(0)).sum().backward()
    assert model._core.bucket_set.allocated, "weights are applied on the way into a bucket"


def test_accumulated_gradients_live_in_the_buckets_too() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 5, 4, 2), transport=transport, bucket_cap_mb=1e-4)
        model(batch(0)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            for step in range(2):
                model(batch(transport.rank, step)).sum().backward()
                assert sum(storages(model).values()) == model._core.bucket_set.layout.nbytes
        before = storages(model)
        model(batch(transport.rank)).sum().backward()
        assert storages(model) == before

    run(body, 2)


def test_gradients_start_on_cache_lines() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 5, 4, 2), transport=transport)
        model(batch(0)).sum().backward()
        assert {param.grad.storage_offset() * 4 % 64 for param in model.parameters()} == {0}

    run(body, 2)


def test_a_gradient_set_through_data_is_taken() -> None:
    def body(transport: Transport) -> float:
        model = DDP(nn.Linear(1, 1, bias=False), transport=transport)
        weight = model.module.weight
        model(torch.ones(1, 1)).sum().backward()
        weight.grad.data = torch.full((1, 1), 10.0 * transport.rank)  # as some optimizers of old do
        model(torch.ones(1, 1)).sum().backward()
        return float(weight.grad)

    assert run(body, 2) == [6.0, 6.0]


# --------------------------------------------------------------------------------------------------------- the order


class Backwards(nn.Module):
    """Layers that are used in the opposite order of their registration, so the first guess of the order is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


def order(model: Any, moment: Moment, backward: int) -> list[int]:
    return [stamp.bucket for stamp in model.trace.stamps() if (stamp.moment, stamp.backward) == (moment, backward)]


def test_buckets_are_launched_by_index_whatever_order_they_fill_in() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Backwards(), transport=transport, bucket_cap_mb=ONE_EACH)
        for step in range(2):
            model(batch(transport.rank, step)).sum().backward()
        assert order(model, Moment.READY, 1) == [2, 1, 0], "the guess was wrong"
        assert order(model, Moment.LAUNCHED, 1) == [0, 1, 2]
        assert order(model, Moment.READY, 2) == [0, 1, 2], "the order was learned"
        assert order(model, Moment.LAUNCHED, 2) == [0, 1, 2]

    run(body, 2)


def test_every_rank_takes_up_the_order_that_rank_0_saw() -> None:
    def body(transport: Transport) -> list[tuple[int, ...]]:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=ONE_EACH)
        seen = []
        for uses in ("abt" if transport.rank == 0 else "bta", "tab", "tab"):
            model(batch(0), uses).sum().backward()
            seen.append(model._core.bucket_set.layout.order)
        return seen

    first, second, third = run(body, 3)
    assert first == second == third
    weights = [param for param in first[-1] if param % 2 == 0]  # t, a, b are 0, 2, 4
    assert weights == [0, 4, 2], "rank 0 used a, then b, then t, so t was ready first"
    assert first[1] == first[2]


def test_the_new_order_changes_no_bits() -> None:
    def body(transport: Transport) -> list[Grads]:
        model = DDP(Backwards(), transport=transport, bucket_cap_mb=ONE_EACH)
        results = []
        for _ in range(3):
            model.zero_grad()
            model(batch(transport.rank)).square().sum().backward()
            results.append(grads(model))
        return results

    for results in run(body, 2):
        for later in results[1:]:
            assert_same_bits(later, results[0])


def test_gradients_that_are_kept_move_to_the_new_order() -> None:
    def body(transport: Transport) -> tuple[Grads, Grads]:
        model = DDP(Backwards(), transport=transport, bucket_cap_mb=ONE_EACH)
        model(batch(transport.rank)).sum().backward()
        before = grads(model)
        model(batch(transport.rank))  # a forward takes up the new order
        assert model._core.bucket_set.layout.order == (0, 1, 2)
        return before, grads(model)

    for before, after in run(body, 2):
        assert_same_bits(after, before)


# --------------------------------------------------------------------------------------------------- the textbook way


def test_the_explicit_form_gives_the_same_bits() -> None:
    def train(transport: Transport, overlap: bool) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 5, 4, 2), transport=transport, overlap=overlap, bucket_cap_mb=ONE_EACH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(transport.rank, step)).square().sum().backward()
            if not overlap:
                assert not order(model, Moment.LAUNCHED, step + 1), "nothing flies before it is told to"
                model.sync_gradients()
            optimizer.step()
        return values(model)

    overlapped = run(lambda transport: train(transport, True), 2)
    explicit = run(lambda transport: train(transport, False), 2)
    for got in explicit:
        assert_same_bits(dict(got), dict(overlapped[0]))


def test_sync_gradients_does_nothing_when_there_is_nothing_to_do() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        model(batch(transport.rank)).sum().backward()
        before = grads(model)
        model.sync_gradients()
        model.disable_grad_sync()
        model.sync_gradients()
        assert model._core.reductions_begun == 1
        assert_same_bits(grads(model), before)

    run(body, 2)


def test_sync_gradients_inside_a_backward_is_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2, 2), transport=transport, overlap=False)
        model.module[2].weight.register_post_accumulate_grad_hook(lambda _: model.sync_gradients())
        with pytest.raises(RuntimeError, match="while a backward runs; .* after loss.backward"):
            model(batch(0)).sum().backward()

    run(body, 1)
