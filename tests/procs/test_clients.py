"""Other people's training loops, with our class in the place of torch's: they end with the same bits."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning_fabric.strategies.ddp
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning_fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import paceline
from tests.pool import Pool

STEPS = 10
MICROS = 3
TORCHS = nn.parallel.DistributedDataParallel
# The first call makes every worker import both clients, which takes seconds.
DEADLINE_S = 90.0
pytestmark = pytest.mark.timeout(100)

Train = Callable[[int, int], nn.Module]  # (rank, micros in a step)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batches(rank: int, count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(5, 8, generator=generator) for _ in range(count))


@contextmanager
def in_the_place_of_torchs(substitute: type[nn.Module]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (nn.parallel, nn.parallel.distributed, lightning_fabric.strategies.ddp):
            patch.setattr(module, "DistributedDataParallel", substitute)
        yield


# ------------------------------------------------------------------------------------------------------------- clients


@contextmanager
def accelerator_for(micros: int) -> Iterator[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate sets it otherwise, with a warning
    try:
        yield Accelerator(cpu=True, gradient_accumulation_steps=micros)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def train_with_accelerate(rank: int, micros: int) -> nn.Module:
    with accelerator_for(micros) as accelerator:
        net = small_model()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        for batch in batches(rank, STEPS * micros):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        unwrapped: nn.Module = accelerator.unwrap_model(model)
        assert unwrapped is net
        assert accelerator.get_state_dict(model).keys() == net.state_dict().keys()
        return net


def train_with_fabric(rank: int, micros: int) -> nn.Module:
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = small_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    assert isinstance(model._forward_module, nn.parallel.DistributedDataParallel)
    for number, batch in enumerate(batches(rank, STEPS * micros), start=1):
        last = number % micros == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(batch).square().mean() / micros)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net


# --------------------------------------------------------------------------------------------------------------- tests


def train_with_both(rank: int, size: int, train: Train, micros: int) -> None:
    expected = train(rank, micros).state_dict()
    with in_the_place_of_torchs(paceline.DistributedDataParallel):
        found = train(rank, micros).state_dict()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
    start = small_model().state_dict()
    assert not any(torch.equal(start[name], found[name]) for name in start)


@pytest.mark.parametrize("micros", [1, MICROS], ids=["plain", "accumulated"])
@pytest.mark.parametrize("train", [train_with_accelerate, train_with_fabric])
def test_a_client_ends_with_the_same_weights(procs: Pool, train: Train, micros: int) -> None:
    procs(2).run(train_with_both, train, micros, deadline_s=DEADLINE_S)


def use_without_replacing(rank: int, size: int) -> None:
    net = small_model()
    model = paceline.DistributedDataParallel(net)
    assert isinstance(model, TORCHS)
    with accelerator_for(1) as accelerator:
        assert accelerator.unwrap_model(model) is net
        assert accelerator.get_state_dict(model).keys() == net.state_dict().keys()
        with accelerator.no_sync(model):
            assert not model.do_sync
        assert model.do_sync


def test_accelerate_knows_a_model_that_the_user_wrapped(procs: Pool) -> None:
    procs(2).run(use_without_replacing, deadline_s=DEADLINE_S)


def strip_the_prefix(rank: int, size: int) -> None:
    model, reference = paceline.DistributedDataParallel(small_model()), TORCHS(small_model())
    found: dict[str, Any] = get_model_state_dict(model)
    expected: dict[str, Any] = get_model_state_dict(reference)
    assert list(found) == list(expected) == list(small_model().state_dict())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    doubled = {name: value * 2 for name, value in expected.items()}
    set_model_state_dict(model, dict(doubled))  # which changes the names in what it is given
    assert all(torch.equal(value, doubled[name]) for name, value in model.module.state_dict().items())


def test_torchs_checkpointing_strips_the_prefix(procs: Pool) -> None:
    procs(2).run(strip_the_prefix, deadline_s=DEADLINE_S)
