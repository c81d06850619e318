"""Parameters that take no part: on some ranks, on all, in whole buckets, or all of a rank's."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import UnusedParameters
from tests.models import DDP, Branches, Grads, assert_close, assert_same_bits, draw, grads, mean_grads, values

ONE_EACH = 1e-6  # MiB: a bucket per parameter


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return draw(100 * step + rank, 2, 3)


def loss(model: Any, rank: int, uses: str) -> Any:
    return model(batch(rank), uses).square().sum()


# what each rank uses of the layers t, a and b
USES: dict[str, Sequence[str]] = {
    "all": ["tab", "tab"],
    "one on some": ["tab", "ta"],
    "one on others": ["ta", "tab"],
    "different ones": ["ta", "tb"],
    "one on all": ["ta", "ta"],
    "two on all": ["t", "t"],
    "the first to be ready": ["tb", "tb", "b"],
    "the last to be ready": ["ab", "ab", "tab"],
    "almost nothing": ["t", "a", "b"],
    "in another order": ["tab", "bat"],
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("cap", [None, ONE_EACH], ids=["one bucket", "a bucket each"])
@pytest.mark.parametrize("find", [False, True], ids=["", "find_unused"])
def test_unused_parameters_count_as_zero(name: str, cap: float | None, find: bool) -> None:
    uses = USES[name]

    def body(transport: Transport) -> list[Grads]:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=cap, find_unused_parameters=find)
        results = []
        for _ in range(3):
            model.zero_grad()
            loss(model, transport.rank, uses[transport.rank]).backward()
            results.append(grads(model))
        return results

    expected = mean_grads(Branches(), lambda module, rank: loss(module, rank, uses[rank]), len(uses))
    for results in run(body, len(uses)):
        for got in results:
            assert_same_bits(got, expected)


@pytest.mark.parametrize("cap", [None, ONE_EACH], ids=["one bucket", "a bucket each"])
def test_a_gradient_that_nobody_touched_stays_as_it_was(cap: float | None) -> None:
    def body(transport: Transport) -> torch.Tensor:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=cap)
        model.module.b.weight.grad = torch.full((3, 3), float(transport.rank))  # its own on each rank
        for _ in range(3):
            loss(model, transport.rank, "ta").backward()
            assert model.module.b.bias.grad is None
        kept: torch.Tensor = model.module.b.weight.grad
        return kept.clone()

    for rank, got in enumerate(run(body, 2)):
        assert torch.equal(got, torch.full((3, 3), float(rank)))


def test_a_reduced_gradient_that_nobody_touches_next_is_kept() -> None:
    def body(transport: Transport) -> tuple[Grads, Grads]:
        model = DDP(Branches(), transport=transport)
        loss(model, transport.rank, "tab").backward()
        before = grads(model)
        loss(model, transport.rank, "ta").backward()
        return before, grads(model)

    for before, after in run(body, 2):
        for name in ("b.weight", "b.bias"):
            assert_same_bits({name: after[name]}, {name: before[name]})


def test_what_is_used_may_change_from_step_to_step() -> None:
    plan = [("tab", "tab"), ("ta", "tb"), ("t", "t"), ("tab", "b"), ("tab", "tab")]

    def body(transport: Transport) -> list[Grads]:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=ONE_EACH)
        results = []
        for uses in plan:
            model.zero_grad()
            loss(model, transport.rank, uses[transport.rank]).backward()
            results.append(grads(model))
        return results

    def planned(uses: tuple[str, str], model: Any, rank: int) -> Any:
        return loss(model, rank, uses[rank])

    wanted = [mean_grads(Branches(), partial(planned, uses), 2) for uses in plan]
    for results in run(body, 2):
        for got, expected in zip(results, wanted, strict=True):
            assert_same_bits(got, expected)


def test_used_in_one_micro_is_used_in_the_step() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Branches(), transport=transport, unused="error")
        with model.no_sync():
            loss(model, transport.rank, "tb").backward()
        loss(model, transport.rank, "ta").backward()
        return grads(model)

    expected = mean_grads(Branches(), lambda m, rank: loss(m, rank, "tb") + loss(m, rank, "ta"), 2)
    for got in run(body, 2):
        assert_close(got, expected)


def test_there_is_no_extra_collective_when_all_are_used() -> None:
    def body(transport: Transport) -> list[str]:
        calls: list[str] = []
        model = DDP(Branches(), transport=Counting(transport, calls))
        loss(model, transport.rank, "tab").backward()
        calls.clear()
        loss(model, transport.rank, "tab").backward()
        return calls

    assert run(body, 2) == [["all_reduce", "all_gather"]] * 2


class Counting:
    """A transport that writes down what is asked of it."""

    def __init__(self, inner: Transport, calls: list[str]) -> None:
        self._inner = inner
        self._calls = calls

    def dup(self, timeout_s: float | None = None) -> "Counting":
        return Counting(self._inner.dup(), self._calls)

    def __getattr__(self, name: str) -> Any:
        if name in ("all_reduce", "broadcast", "all_gather"):
            self._calls.append(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("uses", [["t", "t"], ["tab", "tab"]], ids=["some", "none"])
def test_buckets_that_nobody_uses_may_be_left_out(uses: list[str]) -> None:
    def body(transport: Transport) -> tuple[Grads, int]:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=ONE_EACH, skip_all_reduce_unused_params=True)
        loss(model, transport.rank, uses[transport.rank]).backward()
        return grads(model), model._core.buckets_reduced

    expected = mean_grads(Branches(), lambda module, rank: loss(module, rank, uses[rank]), 2)
    for got, reduced in run(body, 2):
        assert_same_bits(got, expected)
        assert reduced == 2 * len(uses[0])


# ------------------------------------------------------------------------------------ a loss that touches no parameter


class Untouched(nn.Module):
    """On demand gives an output that no parameter had a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: torch.Tensor, *, touched: bool) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) if touched else x * 2
        return out


def step_on_all(model: Any, rank: int, *, touched: bool, x_requires_grad: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(rank).requires_grad_(x_requires_grad)
    out = model(x, touched=touched).square().sum()
    if out.requires_grad:
        out.backward()
    optimizer.step()


@pytest.mark.parametrize("x_requires_grad", [False, True], ids=["no graph", "a graph to the input"])
def test_a_rank_whose_loss_touches_nothing_joins_at_the_step(x_requires_grad: bool) -> None:
    def body(transport: Transport) -> list[dict[str, torch.Tensor]]:
        model = DDP(Untouched(), transport=transport)
        results = []
        for step in range(4):  # alternating, so that nobody is left over from the step before
            model.zero_grad()
            touched = transport.rank == 0 or step % 2 == 1
            step_on_all(model, transport.rank, touched=touched, x_requires_grad=x_requires_grad)
            results.append(values(model))
        return results

    first, second = run(body, 2)
    for one, other in zip(first, second, strict=True):
        assert_same_bits(dict(one), dict(other))
    alone = Untouched()
    alone(batch(0), touched=True).square().sum().backward()
    for name, param in alone.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(first[0][name], param.detach() - 0.05 * param.grad)


def test_a_step_after_losses_that_touch_nothing_anywhere_changes_nothing() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Untouched(), transport=transport)
        before = values(model)
        step_on_all(model, transport.rank, touched=False, x_requires_grad=False)
        assert_same_bits(dict(values(model)), dict(before))
        assert all(grad is None for grad in grads(model).values())

    run(body, 2)


def test_a_last_micro_that_touches_nothing_joins_with_the_earlier_ones() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Untouched(), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with model.no_sync():
            model(batch(transport.rank), touched=True).square().sum().backward()
        out = model(batch(transport.rank, 1), touched=transport.rank == 0).square().sum()
        if out.requires_grad:
            out.backward()
        optimizer.step()
        return grads(model)

    def both(module: Any, rank: int) -> Any:
        total = module(batch(rank), touched=True).square().sum()
        return total + module(batch(rank, 1), touched=rank == 0).square().sum()

    expected = mean_grads(Untouched(), both, 2)
    for got in run(body, 2):
        assert_close(got, expected)


def test_a_rank_that_joins_before_gradients_are_clipped_ends_with_the_same_weights() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(Untouched(), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(batch(transport.rank), touched=transport.rank == 0).square().sum()
        if out.requires_grad:
            out.backward()
        model.sync_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return values(model)

    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))


# ------------------------------------------------------------------------------------------------- told to refuse them


def refused(uses: Sequence[str], **arguments: Any) -> list[str]:
    def body(transport: Transport) -> str:
        model = DDP(Branches(), transport=transport, unused="error", **arguments)
        with pytest.raises(UnusedParameters) as caught:
            loss(model, transport.rank, uses[transport.rank]).backward()
        loss(model, transport.rank, "tab").backward()  # the next one is fine
        return str(caught.value)

    return run(body, len(uses))


@pytest.mark.parametrize(
    ("uses", "lines"),
    [
        (["ta", "ta", "ta"], ["b.weight: unused on all ranks", "b.bias: unused on all ranks"]),
        (["tab", "ta", "tab"], ["b.weight: unused on rank 1 only", "b.bias: unused on rank 1 only"]),
        (["ta", "tab", "t"], ["a.weight: unused on rank 2 only", "b.weight: unused on ranks 0, 2"]),
    ],
)
@pytest.mark.parametrize("cap", [None, ONE_EACH], ids=["one bucket", "a bucket each"])
def test_every_rank_is_told_what_is_unused_and_where(uses: list[str], lines: list[str], cap: float | None) -> None:
    messages = refused(uses, bucket_cap_mb=cap)
    assert len(set(messages)) == 1
    for line in lines:
        assert re.search(rf"^  {line}$", messages[0], re.MULTILINE)
    assert "t.weight" not in messages[0]
    assert 'pass unused="zero"' in messages[0]


def test_used_everywhere_is_not_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport, unused="error")
        for _ in range(2):
            loss(model, transport.rank, "tab").backward()

    run(body, 2)


def test_a_static_graph_that_changes_is_refused_by_name() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport, static_graph=True)
        loss(model, transport.rank, "tab").backward()
        with pytest.raises(RuntimeError, match=r"graph has changed.*b\.weight \(unused now, used before\)"):
            loss(model, transport.rank, "ta").backward()

    run(body, 2)
