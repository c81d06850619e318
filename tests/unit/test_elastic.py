"""Elastic in a world of one, which stays as it is: what an attempt puts back, and what is refused."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import paceline
from paceline.errors import IllegalMove, UsageError


class Script:
    """A model, and what trains it."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.loader: paceline.Loader[torch.Tensor] = paceline.Loader(list(torch.randn(32, 4)), 4)
        self.run = paceline.Elastic(model=self.net, optimizer=self.optimizer, loader=self.loader, **more)
        self.batches = self.loader.endless()

    def step(self, fails: str = "") -> None:
        with self.run.attempt():
            self.net(next(self.batches)).square().mean().backward()
            if fails == "before":
                raise ZeroDivisionError
            with self.run.commit():
                self.optimizer.step()
                if fails == "in":
                    raise ZeroDivisionError
            self.optimizer.zero_grad()
            if fails == "after":
                raise ZeroDivisionError

    def digest(self) -> str:
        return paceline.digest(self.net, self.optimizer, self.run.step, self.loader)


@pytest.fixture
def script() -> Iterator[Script]:
    found = Script()
    yield found
    found.run._updates.close()


@pytest.fixture
def quiet() -> str:
    one = Script()
    for _ in range(4):
        one.step()
    one.run.finish()
    return one.digest()


def test_a_failed_attempt_leaves_no_trace(quiet: str, script: Script) -> None:
    script.step()
    with pytest.raises(ZeroDivisionError):
        script.step(fails="before")
    assert script.run.step == 1
    assert all(param.grad is None for param in script.net.parameters())
    for _ in range(3):
        script.step()
    assert script.digest() == quiet


def test_what_fails_after_the_commit_was_committed(quiet: str, script: Script) -> None:
    script.step()
    with pytest.raises(ZeroDivisionError):
        script.step(fails="after")
    assert script.run.step == 2
    for _ in range(2):
        script.step()
    assert script.digest() == quiet


def test_nothing_goes_on_from_a_torn_state(script: Script) -> None:
    with pytest.raises(ZeroDivisionError):
        script.step(fails="in")
    with pytest.raises(IllegalMove, match="got torn"):
        script.step()


def test_an_update_outside_of_a_commit_is_refused(script: Script) -> None:
    before = [param.tolist() for param in script.net.parameters()]
    with script.run.attempt():
        script.net(torch.randn(4, 4)).sum().backward()
        with pytest.raises(IllegalMove, match="outside `with run.commit"):
            script.optimizer.step()
    script.net.zero_grad()
    with pytest.raises(IllegalMove, match="outside `with run.commit"):
        script.optimizer.step()
    assert [param.tolist() for param in script.net.parameters()] == before


def test_an_optimizer_that_was_not_declared_is_named(script: Script) -> None:
    stranger = torch.optim.SGD(script.net.parameters(), lr=1.0)
    before = [param.tolist() for param in script.net.parameters()]
    with script.run.attempt():
        script.net(torch.randn(4, 4)).sum().backward()
        with pytest.raises(UsageError, match="a SGD that was not declared to paceline.Elastic was about to step"):
            stranger.step()
    assert [param.tolist() for param in script.net.parameters()] == before


def test_an_optimizer_may_step_inside_another(script: Script) -> None:
    inner = torch.optim.SGD(script.net.parameters(), lr=1.0)
    script.optimizer.register_step_post_hook(lambda *_: None)
    with script.run.attempt():
        script.net(torch.randn(4, 4)).sum().backward()
        with script.run.commit():
            hook = script.optimizer.register_step_pre_hook(lambda *_: inner.step())
            script.optimizer.step()
            hook.remove()
    assert script.run.step == 1


def test_a_scheduler_that_was_not_declared_is_named() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="has a learning rate scheduler that was not declared"):
        paceline.Elastic(model=net, optimizer=optimizer)
    paceline.Elastic(model=net, optimizer=optimizer, scheduler=scheduler).finish()


def test_what_has_no_state_is_named() -> None:
    with pytest.raises(UsageError, match="best= was given a float"):
        paceline.Elastic(model=nn.Linear(2, 2), best=0.5)


def test_the_generators_of_a_failed_attempt_are_put_back(script: Script) -> None:
    drawn: list[object] = []

    def draw() -> None:
        with script.run.attempt():
            drawn.append((torch.rand(3).tolist(), random.random()))
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            draw()
    assert drawn[0] == drawn[1]


def test_a_gradient_scaler_may_unscale_again_after_a_failed_attempt() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    one = Script(scaler=scaler)
    for fails in (True, False):
        try:
            with one.run.attempt():
                scaler.scale(one.net(next(one.batches)).square().mean()).backward()
                scaler.unscale_(one.optimizer)
                if fails:
                    raise ZeroDivisionError
                with one.run.commit():
                    scaler.step(one.optimizer)
                    scaler.update()
        except ZeroDivisionError:
            continue
    assert one.run.step == 1
    one.run.finish()


def test_it_begins_where_the_newest_checkpoint_is(tmp_path: Any, quiet: str) -> None:
    saves = paceline.Checkpointer(tmp_path, asynchronous=False)
    first = Script(checkpoints=saves)
    for _ in range(2):
        first.step()
    saves.save(first.run.step, **first.run.declared)
    first.step()
    first.run.finish()
    drawn = torch.get_rng_state()
    second = Script(checkpoints=saves)
    assert second.run.step == 2
    again = Script()
    for _ in range(2):
        again.step()
    again.run.finish()
    for _ in range(2):
        second.step()
    assert (second.run.step, second.digest()) == (4, quiet)
    second.run.finish()
    saves.__exit__(None, None, None)
    torch.set_rng_state(drawn)


class Interrupted(Exception):
    """What a handler of the script raises."""


@pytest.fixture
def on_alarm() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    earlier = signal.signal(signal.SIGUSR2, interrupt)
    yield
    assert signal.getsignal(signal.SIGUSR2) is interrupt, "what the script has installed is there again"
    signal.signal(signal.SIGUSR2, earlier)


@pytest.mark.usefixtures("on_alarm")
def test_an_interrupt_in_an_update_is_raised_when_the_step_is_committed(quiet: str, script: Script) -> None:
    script.optimizer.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGUSR2))
    for step in range(4):
        with pytest.raises(Interrupted):
            script.step()
        assert script.run.step == step + 1
    assert script.digest() == quiet


@pytest.mark.usefixtures("on_alarm")
def test_the_second_interrupt_in_an_update_leaves_it(script: Script) -> None:
    def twice(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)

    script.optimizer.register_step_post_hook(twice)
    with pytest.raises(Interrupted):
        script.step()
    assert script.run.step == 0


@pytest.mark.usefixtures("on_alarm")
def test_each_of_two_interrupts_of_an_update_is_handled(script: Script) -> None:
    noted: list[int] = []

    def both(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        assert noted == []

    script.optimizer.register_step_post_hook(both)
    earlier = signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
    try:
        with pytest.raises(Interrupted):
            script.step()
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert (noted, script.run.step) == ([1], 1)


def test_an_update_in_another_thread_has_no_interrupts(script: Script) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(script.step).result()
    assert script.run.step == 1
