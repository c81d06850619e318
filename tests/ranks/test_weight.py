"""weight(n): the exact mean over all tokens of all ranks and microbatches."""

import re
from typing import Any

import pytest
import torch

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import CollectiveMismatch, UnreducedGradients, UsageError
from tests.models import DDP, Branches, Grads, assert_close, assert_same_bits, draw, grads, mlp

COUNTS = [[5, 1], [2, 7], [3, 3]]  # tokens of each microbatch on each rank


def tokens(rank: int, microbatch: int, counts: list[list[int]] = COUNTS) -> torch.Tensor:
    return draw(100 * microbatch + rank, counts[rank][microbatch], 3)


def loss(model: Any, x: torch.Tensor) -> Any:
    return model(x).square().sum(1).mean()


def all_tokens(size: int = 3, microbatches: int = 2, counts: list[list[int]] = COUNTS) -> Grads:
    alone = mlp(3, 4, 2)
    loss(
        alone,
        torch.cat([tokens(rank, microbatch, counts) for rank in range(size) for microbatch in range(microbatches)]),
    ).backward()
    return grads(alone)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "explicit": {"overlap": False},
    "static graph": {"static_graph": True},
    "a bucket each": {"bucket_cap_mb": 1e-6},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_mean_is_over_tokens_not_over_ranks(settings: str) -> None:
    def body(transport: Transport) -> list[Grads]:
        model = DDP(mlp(3, 4, 2), transport=transport, **SETTINGS[settings])
        results = []
        for _ in range(3):
            model.zero_grad()
            for microbatch in range(2):
                x = tokens(transport.rank, microbatch)
                model.require_backward_grad_sync = microbatch == 1
                with model.weight(len(x)):
                    loss(model, x).backward()
            if settings == "explicit":
                model.sync_gradients()
            results.append(grads(model))
        return results

    everything = run(body, 3)
    for results in everything:
        for got in results:
            assert_close(got, all_tokens())
            assert_same_bits(got, everything[0][0])


def test_what_was_accumulated_may_be_reduced_afterwards() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        with model.no_sync():
            for microbatch in range(2):
                x = tokens(transport.rank, microbatch)
                with model.weight(len(x)):
                    loss(model, x).backward()
        model.sync_gradients()
        return grads(model)

    for got in run(body, 3):
        assert_close(got, all_tokens())


def test_ranks_may_run_different_numbers_of_micros() -> None:
    counts = [[5], [2], [3]]

    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        x = tokens(transport.rank, 0, counts)
        with model.no_sync():
            for part in x.split(2):
                with model.weight(len(part)):
                    loss(model, part).backward()
        model.sync_gradients()
        return grads(model)

    for got in run(body, 3):
        assert_close(got, all_tokens(3, 1, counts))


def test_equal_weights_are_the_plain_mean() -> None:
    def body(transport: Transport) -> tuple[Grads, Grads]:
        x = draw(transport.rank, 4, 3)
        model = DDP(mlp(3, 4, 2), transport=transport)
        loss(model, x).backward()
        plain = grads(model)
        model.zero_grad()
        with model.weight(4):
            loss(model, x).backward()
        return plain, grads(model)

    for plain, weighted in run(body, 2):
        assert_same_bits(weighted, plain)


def test_a_weight_of_zero_counts_for_nothing() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        with model.weight(3 if transport.rank == 0 else 0):
            loss(model, draw(transport.rank, 3, 3)).backward()
        return grads(model)

    alone = mlp(3, 4, 2)
    loss(alone, draw(0, 3, 3)).backward()
    for got in run(body, 2):
        assert_close(got, grads(alone))


def test_a_parameter_unused_somewhere_counts_as_zero_there() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Branches(), transport=transport)
        with model.weight(transport.rank + 1):
            model(draw(transport.rank, 2, 3), "tab" if transport.rank else "ta").sum().backward()
        return grads(model)

    alone = Branches()
    (sum(alone(draw(r, 2, 3), "tab" if r else "ta").sum() * (r + 1) for r in range(2)) / 3).backward()
    for got in run(body, 2):
        assert_close(got, grads(alone))


def test_weight_ends_with_its_block() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        with pytest.raises(ZeroDivisionError), model.weight(7):
            raise ZeroDivisionError
        loss(model, draw(transport.rank, 2, 3)).backward()
        return grads(model)

    alone = mlp(3, 4, 2)
    loss(alone, torch.cat([draw(rank, 2, 3) for rank in range(2)])).backward()
    for got in run(body, 2):
        assert_close(got, grads(alone))


# ------------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_count_is_refused(bad: float) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        message = f"expected a weight of zero or more, such as a number of tokens, got {bad!r}"
        with pytest.raises(UsageError, match=re.escape(message)), model.weight(bad):
            pass

    run(body, 1)


@pytest.mark.parametrize("bad", ["three", None, [3]], ids=str)
def test_a_weight_of_another_type_is_refused(bad: Any) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        with pytest.raises((UsageError, TypeError), match="expected a weight"), model.weight(bad):
            pass

    run(body, 1)


def test_a_number_of_tokens_may_be_a_tensor() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        with model.weight(torch.tensor(3)):
            loss(model, draw(0, 3, 3)).backward()

    run(body, 2)


def test_old_gradients_are_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        loss(model, draw(0, 2, 3)).backward()
        with pytest.raises(UsageError, match=r"starts from empty gradients.*call optimizer.zero_grad\(\)"):  # noqa: SIM117
            with model.weight(2):
                pass

    run(body, 2)


@pytest.mark.parametrize("weighted", [(True, False), (False, True)])
def test_micros_inside_and_outside_of_one_step_are_refused_on_every_rank(weighted: tuple[bool, bool]) -> None:
    def microbatch(model: Any, inside: bool) -> None:
        if inside:
            with model.weight(2):
                loss(model, draw(0, 2, 3)).backward()
        else:
            loss(model, draw(0, 2, 3)).backward()

    def body(transport: Transport) -> str:
        model = DDP(mlp(3, 2), transport=transport)
        with pytest.raises(CollectiveMismatch) as caught:
            microbatch(model, weighted[transport.rank])
        model.zero_grad()
        microbatch(model, True)  # together again
        return str(caught.value)

    first, second = run(body, 2)
    assert first == second
    assert "put every microbatch of a step, on every rank, inside weight()" in first


def test_a_weighted_micro_before_a_plain_one_is_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        with model.no_sync(), model.weight(2):
            loss(model, draw(0, 2, 3)).backward()
        with pytest.raises(CollectiveMismatch, match="MIXED"):
            loss(model, draw(0, 2, 3)).backward()

    run(body, 2)


def test_weighted_gradients_that_were_not_reduced_are_guarded() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync(), model.weight(2):
            loss(model, draw(0, 2, 3)).backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()

    run(body, 2)


def test_weighted_micros_can_be_thrown_away() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 2), transport=transport)
        with model.no_sync(), model.weight(2):
            loss(model, draw(99, 2, 3)).backward()
        model.zero_grad()  # this step is given up; nothing of it may be in the next
        with model.weight(2):
            loss(model, draw(transport.rank, 2, 3)).backward()
        return grads(model)

    alone = mlp(3, 2)
    loss(alone, torch.cat([draw(rank, 2, 3) for rank in range(2)])).backward()
    for got in run(body, 2):
        assert_close(got, grads(alone))
