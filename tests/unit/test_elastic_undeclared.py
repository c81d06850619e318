"""What an attempt uses and nobody has declared is refused in the line that uses it, by its name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.in_use import uses

DATA: Any = list(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
FIT = r"was not declared to"


class Run:
    """A model that an optimizer trains, and what else is declared."""

    def __init__(self, **declared: Any) -> None:
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.run = paceline.Elastic(model=self.net, optimizer=self.optimizer, **declared)

    def step(self, x: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        loss = self.net(x).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        with self.run.commit():
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
        self.optimizer.zero_grad()


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    yield found
    found.run._updates.close()
    assert not uses._listeners, "nobody listens outside of attempts"


def test_a_loader(run: Run) -> None:
    loader: paceline.Loader[torch.Tensor] = paceline.Loader(DATA, 4)
    batches = loader.endless()
    next(batches)  # outside of an attempt it is nobody's business
    match = rf"a Loader that {FIT} paceline.Elastic is used in an attempt.*loader=loader"
    with pytest.raises(UsageError, match=match), run.run.attempt():
        next(batches)
    assert run.run.step == 0


def test_a_loader_that_was_begun_before(run: Run) -> None:
    loader: paceline.Loader[torch.Tensor] = paceline.Loader(DATA, 4)
    batches = iter(loader)
    next(batches)
    with pytest.raises(UsageError, match="a Loader that was not declared"), run.run.attempt():
        next(batches)


def test_a_sampler(run: Run) -> None:
    sampler: paceline.DistributedSampler[int] = paceline.DistributedSampler(DATA, 1, 0)
    batches = iter(torch.utils.data.DataLoader(DATA, 4, sampler=sampler))
    next(batches)
    with pytest.raises(UsageError, match=rf"a DistributedSampler that {FIT} .*sampler=sampler"), run.run.attempt():
        next(batches)
    with pytest.raises(UsageError, match="a DistributedSampler that was not declared"), run.run.attempt():
        sampler.commit(4)


def test_a_checkpointer(run: Run, tmp_path: Path) -> None:
    with paceline.Checkpointer(tmp_path, asynchronous=False, every_steps=1) as checkpoints:
        match = rf"a Checkpointer that {FIT} .*checkpoints=checkpoints"
        with pytest.raises(UsageError, match=match), run.run.attempt():
            checkpoints.save(1, model=run.net)
        with pytest.raises(UsageError, match="a Checkpointer that was not declared"), run.run.attempt():
            checkpoints.due(1)
        checkpoints.save(1, model=run.net)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler(run: Run, fused: bool) -> None:
    if fused:
        run = Run()
        run.optimizer = torch.optim.SGD(run.net.parameters(), lr=0.1, fused=True)
        run.run._updates.close()
        run.run = paceline.Elastic(model=run.net, optimizer=run.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [param.tolist() for param in run.net.parameters()]
    match = rf"SGD.step\(\) was called by a GradScaler that.*{FIT}.*scaler=scaler"
    with pytest.raises(UsageError, match=match), run.run.attempt():
        run.step(DATA[0], scaler)
    assert [param.tolist() for param in run.net.parameters()] == before
    run.run._updates.close()


def test_a_gradient_scaler_that_does_nothing_has_no_state(run: Run) -> None:
    with run.run.attempt():
        run.step(DATA[0], torch.amp.GradScaler("cpu", enabled=False))
    assert run.run.step == 1


def test_what_was_declared_may_be_used(tmp_path: Path) -> None:
    loader: paceline.Loader[torch.Tensor] = paceline.Loader(DATA, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sampler: paceline.DistributedSampler[int] = paceline.DistributedSampler(DATA, 1, 0)
    checkpoints = paceline.Checkpointer(tmp_path, asynchronous=False)
    one = Run(loader=loader, scaler=scaler, sampler=sampler, checkpoints=checkpoints)
    batches, indices = loader.endless(), iter(sampler)
    for step in (1, 2):
        with one.run.attempt():
            one.step(next(batches) + DATA[next(indices)], scaler)
            sampler.commit(1)
            checkpoints.save(step, **one.run.declared)
    one.run.finish()
    assert one.run.step == 2
    checkpoints.__exit__(None, None, None)
