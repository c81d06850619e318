"""Several backwards in one step: when they reduce, and to what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.collectives import Transport
from paceline.collectives.threads import run
from tests.models import DDP, Grads, assert_close, assert_same_bits, draw, grads, mean_grads, mlp

MICROS = 3


def batch(rank: int, microbatch: int) -> torch.Tensor:
    return draw(100 * microbatch + rank, 4, 3)


def loss(model: Any, rank: int, microbatch: int) -> Any:
    return model(batch(rank, microbatch)).square().mean() / MICROS


def expected(size: int) -> Grads:
    def all_micros(module: Any, rank: int) -> torch.Tensor:
        for microbatch in range(MICROS - 1):
            loss(module, rank, microbatch).backward()
        total: torch.Tensor = loss(module, rank, MICROS - 1)
        return total

    return mean_grads(mlp(3, 4, 2), all_micros, size)


# -------------------------------------------------------------------------------------------------- one step, however


def around_both(model: Any, rank: int) -> None:
    with model.no_sync():
        for microbatch in range(MICROS - 1):
            loss(model, rank, microbatch).backward()
    loss(model, rank, MICROS - 1).backward()


def around_backward_alone(model: Any, rank: int) -> None:
    for microbatch in range(MICROS - 1):
        out = loss(model, rank, microbatch)
        with model.no_sync():
            out.backward()
    loss(model, rank, MICROS - 1).backward()


def around_forward_alone_where_it_counts_for_nothing(model: Any, rank: int) -> None:
    with model.no_sync():
        for microbatch in range(MICROS - 1):
            loss(model, rank, microbatch).backward()
        out = loss(model, rank, MICROS - 1)
    out.backward()


def switched_off_and_on(model: Any, rank: int) -> None:
    model.disable_grad_sync()
    assert not model.do_sync
    for microbatch in range(MICROS - 1):
        loss(model, rank, microbatch).backward()
    model.enable_grad_sync()
    assert model.do_sync
    loss(model, rank, MICROS - 1).backward()


def reduced_afterwards(model: Any, rank: int) -> None:
    with model.no_sync():
        for microbatch in range(MICROS):
            loss(model, rank, microbatch).backward()
    model.sync_gradients()


def through_the_module(model: Any, rank: int) -> None:
    with model.no_sync():
        for microbatch in range(MICROS - 1):
            loss(model.module, rank, microbatch).backward()
    loss(model.module, rank, MICROS - 1).backward()


def by_torchs_attribute(model: Any, rank: int) -> None:
    model.require_backward_grad_sync = False
    for microbatch in range(MICROS - 1):
        loss(model, rank, microbatch).backward()
    model.require_backward_grad_sync = True
    loss(model, rank, MICROS - 1).backward()


WAYS: list[Callable[[Any, int], None]] = [
    around_both,
    around_backward_alone,
    around_forward_alone_where_it_counts_for_nothing,
    switched_off_and_on,
    reduced_afterwards,
    through_the_module,
    by_torchs_attribute,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "explicit": {"overlap": False},
    "static graph": {"static_graph": True},
    "one bucket each": {"bucket_cap_mb": 1e-6},
    "bucket views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "unused is an error": {"unused": "error"},
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_way_to_accumulate_gives_the_same_bits(way: Callable[[Any, int], None], settings: str) -> None:
    def body(transport: Transport) -> list[Grads]:
        model = DDP(mlp(3, 4, 2), transport=transport, **SETTINGS[settings])
        results = []
        for step in range(3):  # the second takes up the learned order
            model.zero_grad()
            way(model, transport.rank)
            if settings == "explicit" and way is not reduced_afterwards:
                model.sync_gradients()
            assert model._core.reductions_begun == step + 1
            results.append(grads(model))
        return results

    wanted = expected(2)
    for results in run(body, 2):
        for got in results:
            assert_same_bits(got, wanted)


def test_the_loop_equals_one_big_batch() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        around_both(model, transport.rank)
        return grads(model)

    whole = mlp(3, 4, 2)
    everything = torch.cat([batch(rank, microbatch) for rank in range(3) for microbatch in range(MICROS)])
    whole(everything).square().mean().backward()
    for got in run(body, 3):
        assert_close(got, grads(whole))


# -------------------------------------------------------------------------------------------------------- switches


def test_gradients_inside_no_sync_are_the_ranks_own() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        with model.no_sync():
            loss(model, transport.rank, 0).backward()
        assert model._core.reductions_begun == 0
        return grads(model)

    for rank, got in enumerate(run(body, 2)):
        alone = mlp(3, 4, 2)
        loss(alone, rank, 0).backward()
        assert_same_bits(got, grads(alone))


def test_no_sync_gives_back_what_it_found() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        with model.no_sync():
            with model.no_sync():
                assert not model.do_sync
            assert not model.do_sync
        assert model.do_sync
        model.disable_grad_sync()
        with model.no_sync():
            pass
        assert not model.do_sync
        model.enable_grad_sync()
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        assert model.do_sync
        assert model.require_backward_grad_sync

    run(body, 1)


def test_ranks_may_run_different_numbers_of_micros() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        with model.no_sync():
            for microbatch in range(transport.rank + 1):
                loss(model, transport.rank, microbatch).backward()
        model.sync_gradients()
        return grads(model)

    def as_many_as_the_rank_has(module: Any, rank: int) -> torch.Tensor:
        total: torch.Tensor = sum(loss(module, rank, microbatch) for microbatch in range(rank + 1))
        return total

    wanted = mean_grads(mlp(3, 4, 2), as_many_as_the_rank_has, 3)
    for got in run(body, 3):
        assert_close(got, wanted)


def test_a_rank_without_any_micro_joins_by_sync_gradients() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport, overlap=False)
        if transport.rank == 0:
            loss(model, 0, 0).backward()
        model.sync_gradients()
        return grads(model)

    alone = mlp(3, 4, 2)
    loss(alone, 0, 0).backward()
    wanted = {name: None if grad is None else grad / 2 for name, grad in grads(alone).items()}
    for got in run(body, 2):
        assert_same_bits(got, wanted)


def test_gradients_accumulated_over_the_learning_of_the_order_are_kept() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport, bucket_cap_mb=1e-6)
        loss(model, transport.rank, 0).backward()  # learns the order; no zero_grad follows
        with model.no_sync():
            loss(model, transport.rank, 1).backward()
        loss(model, transport.rank, 2).backward()
        return grads(model)

    for got in run(body, 2):
        assert_close(got, expected(2))


@pytest.mark.parametrize("overlap", [True, False])
def test_to_sync_twice_changes_nothing(overlap: bool) -> None:
    def body(transport: Transport) -> tuple[Grads, Grads]:
        model = DDP(mlp(3, 4, 2), transport=transport, overlap=overlap)
        loss(model, transport.rank, 0).backward()
        model.sync_gradients()
        once = grads(model)
        model.sync_gradients()
        return once, grads(model)

    for once, twice in run(body, 3):
        assert_same_bits(twice, once)
