"""What models do with the units of a placement: their outputs, and backwards of other kinds."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from tests.models import DDP, draw, seeded
from tests.ranks.test_placement_corners import SHARDED, assert_as_ddp

pytestmark = pytest.mark.parametrize("placement", SHARDED)


class Residual(nn.Module):
    """Two linear layers in a unit; what it returns may be a view, which the model goes on to change."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.first, self.second, self.view = nn.Linear(8, 8), nn.Linear(8, 8), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return out.view(-1, 8)[:, :] if self.view else out


class Residuals(nn.Module):
    def __init__(self, *, view: bool = False) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(Residual(view=view) for _ in range(3))
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
            x[0] = 0.0
        return self.head(x)


@pytest.mark.parametrize("view", [False, True])
def test_units_whose_outputs_are_changed_in_place(placement: str, view: bool) -> None:
    assert_as_ddp(placement, module=lambda: Residuals(view=view))


def test_a_gradient_penalty(placement: str) -> None:
    """A backward through a backward needs parameters that the first one has done with."""

    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(3):
            x = draw(10 * rank + number, 4, 8).requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop, module=Residuals)


def test_gradients_of_some_parameters(placement: str) -> None:
    """What is given for a parameter in shards is in no graph: it must not be taken for one that was not used."""

    def body(transport: Transport) -> None:
        model = DDP(Residuals(), transport=transport, placement=placement, timeout=20)
        loss = model(draw(transport.rank, 4, 8)).square().mean()
        params = list(model.parameters())
        if placement == "zero3":
            with pytest.raises(RuntimeError, match="requires?[ _]grad"):
                torch.autograd.grad(loss, params, allow_unused=True)
            with pytest.raises(RuntimeError, match="requires?[ _]grad"):
                loss.backward(inputs=params)
        else:
            assert len(torch.autograd.grad(loss, params, retain_graph=True)) == len(params)
            loss.backward(inputs=params)

    run(body, 2)
