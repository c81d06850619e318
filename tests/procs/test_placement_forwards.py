"""Evaluation, generation and checkpointing, between training steps and inside them, under every placement."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import DDP, Grads, assert_same_bits, draw, packed, seeded, unpacked
from tests.pool import Pool

SHARDED = ("zero1", "zero3")
CONTEXTS: dict[str, Any] = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
# Where checkpoints are, and their kind.
CHECKPOINTS = [(where, reentrant) for where in ("around units", "inside units") for reentrant in (True, False)]


class Residual(nn.Module):
    """A block whose insides are computed again in backward, if asked."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 96), nn.Linear(96, 16), nn.Dropout(0.1)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        again: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x + again


class Model(nn.Module):
    def __init__(self, where: str = "", reentrant: bool = False) -> None:
        super().__init__()
        inside = reentrant if where == "inside units" else None
        self.reentrant = reentrant if where == "around units" else None
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Residual(inside) for _ in range(4))
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        y: torch.Tensor = self.last(x)
        return y


def step(model: Any, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)  # for what is dropped
    model(draw(seed, 4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: Any) -> Grads:
    with model.whole():
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def generate(model: Any) -> torch.Tensor:
    """A sequence that grows by what the model says to all of it."""
    sequence = draw(7, 1, 8)
    for _ in range(5):
        sequence = torch.cat([sequence, model(sequence)[-1:].tanh().detach()])
    return sequence.clone()


def with_evaluation(rank: int, placement: str, transport: str, context: str) -> Grads:
    """Training with evaluations between the steps, inside them, and before the first one."""
    model = DDP(Model(), placement=placement, transport=transport, bucket_plan="fixed", timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    found: Grads = {}

    def evaluate(when: str) -> None:
        model.eval()
        with CONTEXTS[context]():
            found[f"generated {when}"] = generate(model)
        model.train()

    evaluate("before the first step")
    for number in range(3):
        step(model, optimizer, 10 * rank + number)
        evaluate(f"after step {number}")
        torch.manual_seed(number)
        loss = model(draw(40 + 10 * rank + number, 4, 8)).square().mean()
        evaluate(f"before backward {number}") if context != "plain" else None
        loss.backward()
        evaluate(f"after backward {number}")
        optimizer.step()
        optimizer.zero_grad()
    units = None if model._owned is None else model._owned.units
    assert units is None or not any(unit.gathered for unit in units._units[:-1]), "evaluation leaves units gathered"
    return weights_of(model) | found


def evaluated(rank: int, size: int, placement: str, transport: str) -> list[tuple[bytes, bytes]]:
    both = ("ddp", placement)
    return [tuple(packed(with_evaluation(rank, one, transport, context)) for one in both) for context in CONTEXTS]  # type: ignore[misc]


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("placement", SHARDED)
def test_evaluation_and_generation_have_the_bits_of_ddp(procs: Pool, placement: str, transport: str) -> None:
    for results in procs(2).run(evaluated, placement, transport):
        for expected, found in results:
            assert_same_bits(unpacked(found), unpacked(expected))


def computed_again(rank: int, size: int, placement: str, transport: str) -> list[tuple[bytes, bytes]]:
    def trained(one: str, where: str, reentrant: bool) -> bytes:
        net = Model(where, reentrant)
        model = DDP(net, placement=one, transport=transport, bucket_plan="fixed", timeout=20)
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
        for number in range(3):
            step(model, optimizer, 10 * rank + number)
            with model.no_sync():
                model(draw(50 + 10 * rank + number, 4, 8)).square().mean().backward()
        return packed(weights_of(model))

    return [(trained("ddp", *how), trained(placement, *how)) for how in CHECKPOINTS]


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("placement", SHARDED)
def test_both_kinds_of_checkpointing_have_the_bits_of_ddp(procs: Pool, placement: str, transport: str) -> None:
    for results in procs(2).run(computed_again, placement, transport):
        for expected, found in results:
            assert_same_bits(unpacked(found), unpacked(expected))
