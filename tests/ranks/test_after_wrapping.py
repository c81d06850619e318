"""What is done to a module after it was wrapped: followed, or refused before anything trains."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import UnreducedGradients
from tests.models import DDP, Branches, assert_close, draw, mlp, values

RANKS = 2


def batch(rank: int | None, step: int) -> torch.Tensor:
    whole = draw(step, 2 * RANKS, 3)
    return whole if rank is None else whole[2 * rank : 2 * rank + 2]


def train(model: Any, optimizer: Any, rank: int | None, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = batch(rank, step).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()


def changed_between_steps(change: Callable[[nn.Module], Any], **settings: Any) -> None:
    """Training goes on after `change` as it does in one process."""

    def one(model: Any, module: nn.Module, rank: int | None) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, rank, range(2))
        change(module)
        train(model, optimizer, rank, range(2, 5))
        return values(module)

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = mlp(3, 4, 2)
        return one(DDP(module, transport=transport, **settings), module, transport.rank)

    whole = mlp(3, 4, 2)
    expected = one(whole, whole, None)
    for got in run(body, RANKS):
        assert_close(dict(got), dict(expected))


# ------------------------------------------------------------------------------------------------ another module


class Around(nn.Module):
    """As torch.compile and others do: another module with the same parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("how", ["attribute", "dict"])
def test_a_module_that_nobody_reduces_is_refused_in_forward(how: str) -> None:
    def body(transport: Transport) -> str:
        model = DDP(mlp(3, 2), transport=transport)
        other = mlp(3, 2, seed=5)
        if how == "attribute":
            model.module = other
        else:
            model._modules["module"] = other
        with torch.no_grad():
            assert torch.equal(model(batch(0, 0)), other(batch(0, 0)))  # evaluation harms nobody
        with pytest.raises(UnreducedGradients) as caught:
            model(batch(transport.rank, 0))
        return str(caught.value)

    for message in run(body, RANKS):
        assert "replaced by another Sequential" in message
        assert "0.weight and 1 more" in message


def test_a_module_around_the_same_parameters_may_take_its_place() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = mlp(3, 4, 2)
        model = DDP(module, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, transport.rank, range(2))
        model.module = Around(module)
        train(model, optimizer, transport.rank, range(2, 4))
        with model.no_sync():
            model(batch(transport.rank, 0)).sum().backward()
        with pytest.raises(UnreducedGradients, match="never reduced"):  # the guard has come along
            optimizer.step()
        return values(module)

    whole = mlp(3, 4, 2)
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), None, range(4))
    for got in run(body, RANKS):
        assert_close(dict(got), dict(values(whole)))


def replace_a_layer(module: Any) -> None:
    module.b = nn.Linear(3, 3)


def replace_a_parameter(module: Any) -> None:
    module.b.weight = nn.Parameter(torch.ones(3, 3))


def add_a_parameter(module: Any) -> None:
    module.t.register_parameter("extra", nn.Parameter(torch.ones(3)))
    module.t.register_forward_hook(lambda layer, _, output: output + layer.extra)


def assign_values(module: Any) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def unfreeze(module: Any) -> None:
    module.a.requires_grad_(True)


@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize(
    "change", [replace_a_layer, replace_a_parameter, add_a_parameter, assign_values, unfreeze], ids=lambda f: f.__name__
)
def test_a_part_that_nobody_reduces_is_refused_by_name(change: Callable[[nn.Module], None], when: str) -> None:
    def body(transport: Transport) -> str:
        module = Branches()
        module.a.requires_grad_(False)
        model = DDP(module, transport=transport)
        if when == "after it":
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), transport.rank, range(1))
        change(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = values(module)
        with pytest.raises(UnreducedGradients) as caught:
            train(model, optimizer, transport.rank, range(1, 2))
        assert all(torch.equal(value, before[name]) for name, value in values(module).items())
        return str(caught.value)

    named: dict[Any, str] = {
        replace_a_layer: "b.weight, b.bias",
        replace_a_parameter: "b.weight",
        add_a_parameter: "t.extra",
    }
    named |= {assign_values: "t.weight, t.bias, b.weight, b.bias", unfreeze: "a.weight, a.bias"}
    for message in run(body, RANKS):
        assert message.startswith(f"{named[change]} became trainable")


@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("change", [replace_a_layer, add_a_parameter, unfreeze], ids=lambda f: f.__name__)
def test_a_part_that_is_in_no_optimizer_is_refused_too(
    change: Callable[[nn.Module], None], when: str, placement: str
) -> None:
    """An optimizer that the model has made has the parameters that were there when the module was wrapped."""

    def body(transport: Transport) -> str:
        module = Branches()
        module.a.requires_grad_(False)
        model = DDP(module, transport=transport, placement=placement, units=[])
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        if when == "after it":
            train(model, optimizer, transport.rank, range(2))
        with model.whole():
            change(module)
            before = {name: param.detach().clone() for name, param in module.named_parameters()}
        with pytest.raises(UnreducedGradients) as caught:
            train(model, optimizer, transport.rank, range(2, 3))
        if placement != "zero3" or change is not replace_a_layer:
            with model.whole():
                assert all(torch.equal(param, before[name]) for name, param in module.named_parameters())
        return str(caught.value)

    named: dict[Any, str] = {replace_a_layer: "b.weight", add_a_parameter: "t.extra", unfreeze: "a.weight, a.bias"}
    for message in run(body, RANKS):
        assert message.startswith(named[change]) and "after wrapping" in message


def test_parameters_of_other_modules_and_frozen_ones_may_come_and_go() -> None:
    """They are looked for, not found, and not looked for again."""

    def body(transport: Transport) -> None:
        module = Branches()
        module.a.requires_grad_(False)
        model = DDP(module, transport=transport, placement="zero1")
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(3):
            nn.Linear(3, 3)
            module.register_parameter("extra", nn.Parameter(torch.ones(3), requires_grad=False))
            train(model, optimizer, transport.rank, range(number, number + 1))
        module.extra.requires_grad_(True)  # as long as nothing uses it, it harms nobody
        train(model, optimizer, transport.rank, range(3, 5))

    run(body, RANKS)


def test_a_parameter_may_be_frozen_and_unfrozen() -> None:
    def toggle(module: Any) -> None:
        module[0].requires_grad_(not module[0].weight.requires_grad)

    def one(model: Any, module: nn.Module, rank: int | None) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            train(model, optimizer, rank, range(step, step + 1))
            toggle(module)
        return values(module)

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = mlp(3, 4, 2)
        return one(DDP(module, transport=transport), module, transport.rank)

    whole = mlp(3, 4, 2)
    expected = one(whole, whole, None)
    for got in run(body, RANKS):
        assert_close(dict(got), dict(expected))


# ------------------------------------------------------------------------------------------------- other contents


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def load(module: nn.Module) -> None:
    module.load_state_dict({name: 0.5 * value for name, value in module.state_dict().items()})


def load_many_times(module: nn.Module) -> None:
    for _ in range(7):  # contents come to lie where those of an earlier load were
        load(module)


def convert(module: nn.Module) -> None:
    module.double()


def convert_and_back(module: nn.Module) -> None:
    module.double().float()


def swap_by_hand(module: nn.Module) -> None:
    for param in list(module.parameters()):
        param.grad = None
        torch.utils.swap_tensors(param, nn.Parameter(0.5 * param.detach().clone()))


def set_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = 0.5 * param.data


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize(
    "change",
    [load, load_many_times, convert, convert_and_back, swap_by_hand, set_data],
    ids=lambda change: change.__name__,
)
def test_parameters_with_other_contents_are_reduced_all_the_same(change: Callable[[nn.Module], None]) -> None:
    changed_between_steps(change)


@pytest.mark.parametrize("change", [load, convert, set_data], ids=lambda change: change.__name__)
def test_so_are_they_where_contents_are_overwritten(change: Callable[[nn.Module], None]) -> None:
    changed_between_steps(change)


@pytest.mark.usefixtures("swapping")
def test_a_module_wrapped_again_after_a_swap_is_reduced() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = mlp(3, 4, 2)
        first = DDP(module, transport=transport)
        load(module)
        model = DDP(module, transport=transport)
        del first
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), transport.rank, range(3))
        return values(module)

    whole = mlp(3, 4, 2)
    load(whole)
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), None, range(3))
    for got in run(body, RANKS):
        assert_close(dict(got), dict(values(whole)))


# ---------------------------------------------------------------------------------------------------- another thread


@pytest.mark.parametrize("name", ["compiled_autograd", "utils"])
def test_another_thread_may_be_importing_dynamo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first step of some optimizers does: its modules are there then, and empty."""
    monkeypatch.setitem(sys.modules, f"torch._dynamo.{name}", ModuleType(name))

    def body(transport: Transport) -> None:
        DDP(mlp(3, 2), transport=transport)(batch(transport.rank, 0)).sum().backward()

    run(body, RANKS)
