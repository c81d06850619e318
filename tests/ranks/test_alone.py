"""A world of one has neither hooks nor buckets, and nobody can tell."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import LocalTransport, Transport, run
from paceline.errors import UnreducedGradients
from tests.models import DDP, mlp


def pair() -> tuple[DDP, nn.Module, torch.optim.Optimizer]:
    net = mlp(3, 4, 2)
    model = DDP(copy.deepcopy(net), transport=LocalTransport())
    return model, net, torch.optim.SGD(model.parameters(), lr=0.1)


def assert_same(model: nn.Module, net: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), net.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_plain_backward_after_a_weighted_one_has_its_own_gradients() -> None:
    model, net, _ = pair()
    with model.weight(4):
        (5 * model(torch.ones(2, 3))).sum().backward()
    model.zero_grad()
    for each in (model, net):
        each(torch.ones(1, 3)).sum().backward()
    assert_same(model, net)


@dataclass
class Told:
    loss: Any


class Opaque:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Wrapped(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.net = mlp(3, 4, 2)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.net(x).sum())


@pytest.mark.parametrize("kind", [Told, Opaque])
def test_an_output_that_cannot_be_looked_into_is_no_reason_to_refuse_a_step(kind: type) -> None:
    model = DDP(Wrapped(kind), transport=LocalTransport())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 3)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_of_inputs_are_no_training() -> None:
    model, _, optimizer = pair()
    x = torch.ones(1, 3, requires_grad=True)
    model(x).sum().backward()
    with model.no_sync():
        torch.autograd.grad(model(x).sum(), x)
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
        torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(UnreducedGradients):
        optimizer.step()


def test_a_replica_that_is_alone_takes_parameters_over_from_one_that_is_not() -> None:
    def body(transport: Transport) -> None:
        net = mlp(3, 4, 2)
        together = DDP(net, transport=transport)
        alone = DDP(net, transport=LocalTransport())
        if transport.rank == 0:  # the others know nothing of it
            alone(torch.ones(1, 3)).sum().backward()
        assert together._core.reductions_begun == 0

    run(body, 2)


def test_buckets_stay_once_they_are_there() -> None:
    model, net, _ = pair()
    model._core.prepare()
    for each in (model, net):
        each(torch.ones(1, 3)).sum().backward()
    assert_same(model, net)
