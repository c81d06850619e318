"""torch's `mixed_precision=`: narrow in forward and backward, wide wherever the user looks."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from paceline.collectives import LocalTransport, Transport
from paceline.collectives.threads import run
from paceline.errors import UsageError
from paceline.strategies.cast import Wire
from tests.models import DDP, assert_close, draw, grads, mlp, values

NARROW = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Ones(nn.Module):
    """A parameter whose gradient is 1 in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias.dtype == torch.bfloat16
        return x + self.bias


def replica(transport: Transport | None = None) -> Any:
    return DDP(Ones(), transport=transport or LocalTransport(), mixed_precision=NARROW)


def backward(model: Any) -> None:
    model(torch.zeros(3)).sum().backward()


def test_parameters_and_gradients_are_wide_and_equal_on_all_ranks() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 3), transport=transport, mixed_precision=NARROW)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for microbatch in range(2):
                with model.no_sync() if microbatch == 0 else nullcontext():
                    model(draw(10 * step + transport.rank, 2, 3)).float().square().sum().backward()
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert {g.dtype for g in grads(model).values() if g is not None} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        return values(model)

    first, second = run(body, 2)
    assert_close(dict(first), dict(second))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_can_be_thrown_away_between_forward_and_backward(set_to_none: bool) -> None:
    model = replica()
    for _ in range(3):
        loss = model(torch.zeros(3)).sum()
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        assert model.module.bias.grad.tolist() == [1.0, 1.0, 1.0]


def test_gradients_are_added_up_when_they_are_not_thrown_away() -> None:
    model = replica()
    backward(model)
    backward(model)
    assert model.module.bias.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("grads_enabled", [True, False])
def test_a_forward_without_a_backward_changes_nothing(grads_enabled: bool) -> None:
    model = replica()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)
    with torch.set_grad_enabled(grads_enabled):
        model(torch.zeros(3))
    assert model.module.state_dict()["bias"].dtype == torch.float32
    optimizer.step()
    assert model.module.bias.tolist() == [-1.0, -1.0, -1.0]


def test_a_forward_that_raises_leaves_wide_parameters() -> None:
    model = replica()
    with pytest.raises(TypeError):
        model(torch.zeros(3), "too many")
    assert model.module.bias.dtype == torch.float32


def test_it_says_itself_how_gradients_are_reduced() -> None:
    with pytest.raises(UsageError, match="mixed_precision says in which dtype"):
        DDP(Ones(), transport=LocalTransport(), mixed_precision=NARROW, reduction=Wire(torch.bfloat16))
