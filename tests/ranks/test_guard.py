"""No optimizer steps on gradients that were never reduced."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from paceline.collectives import LocalTransport, Transport
from paceline.collectives.threads import run
from paceline.errors import UnreducedGradients
from paceline.replica.live import live_replicas
from tests.models import DDP, Branches, assert_close, assert_same_bits, draw, mlp, values


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return draw(100 * step + rank, 2, 3)


def accumulated(model: Any, rank: int) -> torch.optim.Optimizer:
    """An optimizer that is about to step on what this rank alone has seen."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(batch(rank)).sum().backward()
    return optimizer


def test_a_step_on_unreduced_gradients_is_refused_by_name() -> None:
    def body(transport: Transport) -> str:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = accumulated(model, transport.rank)
        before = values(model)
        with pytest.raises(UnreducedGradients) as caught:
            optimizer.step()
        assert_same_bits(dict(values(model)), dict(before))
        model.sync_gradients()
        optimizer.step()
        return str(caught.value)

    (message, _) = run(body, 2)
    for part in ("never reduced", "0.weight, 0.bias", "call sync_gradients()", "pass guard=False"):
        assert part in message


def test_a_long_list_of_names_is_cut() -> None:
    def body(transport: Transport) -> str:
        model = DDP(Branches(), transport=transport)
        with pytest.raises(UnreducedGradients) as caught:
            accumulated(model, transport.rank).step()
        return str(caught.value)

    assert "t.weight, t.bias, a.weight, a.bias, b.weight and 1 more" in run(body, 1)[0]


def test_only_what_was_not_reduced_is_named() -> None:
    def body(transport: Transport) -> str:
        model = DDP(Branches(), transport=transport)
        with model.no_sync():
            model(batch(transport.rank), "t").sum().backward()
        with pytest.raises(UnreducedGradients) as caught:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        return str(caught.value)

    assert "drift apart: t.weight, t.bias. Run" in run(body, 1)[0]


def test_the_textbook_form_without_its_sync_is_refused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport, overlap=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(transport.rank)).sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()

    run(body, 2)


def test_a_step_inside_no_sync_is_meant() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = accumulated(model, transport.rank)
        with model.no_sync():
            optimizer.step()

    run(body, 2)


def test_the_guard_can_be_switched_off() -> None:
    def body(transport: Transport) -> None:
        accumulated(DDP(mlp(3, 2), transport=transport, guard=False), transport.rank).step()

    run(body, 2)


def test_gradients_that_were_thrown_away_are_no_reason_to_refuse() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = accumulated(model, transport.rank)
        optimizer.zero_grad()
        model(batch(transport.rank)).sum().backward()
        optimizer.step()
        with model.no_sync():  # a validation loss, say, whose gradients are dropped
            model(batch(transport.rank)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()

    run(body, 2)


def test_an_optimizer_of_something_else_is_no_concern() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        accumulated(model, transport.rank)
        other = nn.Linear(1, 1)
        other(torch.ones(1, 1)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()

    run(body, 2)


def test_a_replica_may_vanish_while_another_steps() -> None:
    """The collector may end a replica at any moment, and ranks that are threads end theirs when they like."""
    kept = DDP(mlp(3, 2), transport=LocalTransport())
    doomed = [DDP(mlp(3, 2), transport=LocalTransport())]

    def drop(*_: Any) -> None:
        doomed.clear()

    handle = register_optimizer_step_pre_hook(drop)
    other = DDP(mlp(3, 2), transport=LocalTransport())
    try:
        kept(batch(0)).sum().backward()
        torch.optim.SGD([*kept.parameters(), *other.parameters()], lr=0.1).step()
    finally:
        handle.remove()


def test_an_optimizer_of_a_part_is_guarded() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport)
        accumulated(model, transport.rank)
        with pytest.raises(UnreducedGradients):
            torch.optim.SGD(model.module.a.parameters(), lr=0.1).step()

    run(body, 2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_closure_that_reduces_is_fine(kind: Any) -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = kind(model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(transport.rank)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return values(model)

    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))


def test_lbfgs_runs_its_closures() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(0)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return values(model)

    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))


def train_with_closures(model: Any, optimizers: Any, batches: Any, accumulates: Any, keyword: bool) -> None:
    """Accumulate one microbatch, and make the other inside the steps, as Lightning's Trainer does."""
    for step in range(3):
        with accumulates():
            model(batches(2 * step)).square().mean().backward()
        for number, optimizer in enumerate(optimizers):

            def closure(step: int = step, number: int = number) -> None:
                model(batches(2 * step + 1 + 10 * number)).square().mean().backward()

            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        for optimizer in optimizers:
            optimizer.zero_grad()


class Inside(torch.optim.Optimizer):
    """Leaves the step to another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure=closure)


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, Inside])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_closure_completes_an_accumulation(kind: Any, keyword: bool, parts: int) -> None:
    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        params = list(module.parameters())
        return [kind(params[part::parts], lr=0.1) for part in range(parts)]

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 4, 2), transport=transport)
        rank = transport.rank
        # torch walks through the hooks of all optimizers before the closure runs; meanwhile no thread may add one.
        wrapped.wait(20)
        train_with_closures(model, optimizers(model), lambda step: batch(rank, step), model.no_sync, keyword)
        return values(model)

    wrapped = threading.Barrier(2)
    whole = mlp(3, 4, 2)
    wholes = optimizers(whole)
    train_with_closures(
        whole, wholes, lambda step: torch.cat([batch(rank, step) for rank in range(2)]), nullcontext, keyword
    )
    for got in run(body, 2):
        assert_close(dict(got), dict(values(whole)))


def test_a_closure_may_be_run_several_times() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for step in range(2):
            with model.no_sync():
                model(batch(transport.rank, step)).square().mean().backward()

            def closure(step: int = step) -> torch.Tensor:
                loss: torch.Tensor = model(batch(transport.rank, step + 1)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
        return values(model)

    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))


def test_a_closure_that_reduces_nothing_is_refused_before_the_update() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = values(model)

        def closure() -> None:
            with model.no_sync():
                model(batch(transport.rank)).sum().backward()

        with pytest.raises(UnreducedGradients, match="never reduced"):
            optimizer.step(closure)
        assert_same_bits(dict(values(model)), dict(before))

    run(body, 2)


def test_an_optimizer_that_never_calls_its_closure_is_found_out() -> None:
    class Ignores(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    class IgnoresAll(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    def body(transport: Transport) -> None:
        for kind in (Ignores, IgnoresAll):
            model = DDP(mlp(3, 2), transport=transport)
            with model.no_sync():
                model(batch(transport.rank)).sum().backward()
            optimizer = kind(model.parameters(), lr=0.1)
            with pytest.raises(UnreducedGradients):
                optimizer.step(lambda: None)
            model.sync_gradients()
            optimizer.step(lambda: None)

    run(body, 2)


def test_what_a_closure_raises_leaves_the_guard_as_it_was() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        with model.no_sync():
            model(batch(transport.rank)).sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()

    run(body, 2)


# --------------------------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_scaled_by_amp_are_reduced_and_stepped_on(accumulate: bool) -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        model = DDP(mlp(3, 4, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            if accumulate:
                with model.no_sync():
                    scaler.scale(model(batch(transport.rank, step)).square().mean() / 2).backward()
            loss = model(batch(transport.rank, step)).square().mean() / (2 if accumulate else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    alone = mlp(3, 4, 2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        alone(torch.cat([batch(rank, step) for rank in range(2)])).square().mean().backward()
        optimizer.step()
    for got in run(body, 2):
        assert_close(dict(got), dict(values(alone)))


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def body(transport: Transport) -> float:
        model = DDP(mlp(3, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = values(model)
        out = model(batch(transport.rank)).sum()
        scaler.scale(out * (float("inf") if transport.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits(dict(values(model)), dict(before))
        optimizer.zero_grad()
        scaler.scale(model(batch(transport.rank)).sum()).backward()
        scaler.step(optimizer)
        assert not torch.equal(values(model)["0.bias"], before["0.bias"])
        return scaler.get_scale()

    assert run(body, 2) == [512.0, 512.0]


# ----------------------------------------------------------------------------------------------------------- a GAN


def train_gan(generator: nn.Module, critic: nn.Module, noise: Any) -> dict[str, torch.Tensor]:
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (generator, critic)]
    for step in range(3):
        optimizers[1].zero_grad()
        fake = generator(noise(step)).detach()
        (critic(fake).mean() - critic(noise(step + 50)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(generator(noise(step + 99)))).mean().backward()  # leaves gradients on the critic too
        optimizers[0].step()
    return {f"{part}.{name}": value for part, m in enumerate((generator, critic)) for name, value in values(m).items()}


def test_two_replicas_with_an_optimizer_each() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        generator = DDP(mlp(3, 4, 3, seed=1), transport=transport)
        critic = DDP(mlp(3, 4, 1, seed=2), transport=transport)
        return train_gan(generator, critic, lambda step: batch(transport.rank, step))

    whole = train_gan(
        mlp(3, 4, 3, seed=1), mlp(3, 4, 1, seed=2), lambda step: torch.cat([batch(rank, step) for rank in range(2)])
    )
    first, second = run(body, 2)
    assert_same_bits(dict(first), dict(second))
    assert_close(dict(first), dict(whole))


def test_one_optimizer_over_two_replicas_guards_both() -> None:
    def body(transport: Transport) -> None:
        one, two = (DDP(mlp(3, 2, seed=seed), transport=transport) for seed in range(2))
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        one(batch(transport.rank)).sum().backward()
        with two.no_sync():
            two(batch(transport.rank)).sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()
        two.sync_gradients()
        optimizer.step()

    run(body, 2)


def test_parameters_that_ddp_was_told_to_ignore_may_step() -> None:
    def body(transport: Transport) -> None:
        module = mlp(2, 2)
        ignored = [name for name, _ in module.named_parameters()][:1]
        DDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = DDP(module, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    run(body, 2)


def test_a_failed_micro_does_not_blind_the_guard() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(2, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
            out = model(torch.ones(1, 2))
            out.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                out.sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()

    run(body, 2)


def test_switching_synchronisation_off_does_not_allow_local_steps() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(2, 2), transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.disable_grad_sync()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()

    run(body, 2)


# ---- optimizer steps in the trace


def optimizer_stamps(model: Any) -> list[tuple[str, int]]:
    return [(one.moment.value, one.backward) for one in model.trace.stamps() if "optimizer" in one.moment.value]


ONE_STEP = [("optimizer begin", 1), ("optimizer end", 1)]


@pytest.mark.parametrize("guard", [True, False])
def test_a_step_is_stamped_in_the_trace_of_the_replica_that_it_changes(guard: bool) -> None:
    def body(transport: Transport) -> None:
        model, other = (DDP(mlp(3, 3), transport=transport, guard=guard) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stranger = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        model(batch(transport.rank)).sum().backward()
        optimizer.step()
        stranger.step()
        assert optimizer_stamps(model) == ONE_STEP
        assert not optimizer_stamps(other)

    run(body, 2)


def test_a_step_that_is_refused_or_fails_does_not_end_in_the_trace() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("no")

    def body(transport: Transport) -> None:
        model = DDP(mlp(3, 3), transport=transport)
        with pytest.raises(UnreducedGradients):
            accumulated(model, transport.rank).step()
        assert not optimizer_stamps(model)
        model.sync_gradients()
        with pytest.raises(ArithmeticError):
            Fails(model.parameters(), lr=0.1).step()
        assert optimizer_stamps(model) == ONE_STEP[:1]
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()
        assert optimizer_stamps(model) == ONE_STEP[:1]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert optimizer_stamps(model) == [*ONE_STEP[:1], *ONE_STEP]

    run(body, 2)


def test_the_hooks_of_a_replica_that_is_gone_are_removed_with_the_next() -> None:
    module, counts = mlp(3, 3), []
    for _ in range(3):
        model = DDP(module, transport=LocalTransport())
        counts.append((len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)))
        assert [found for found, _ in live_replicas() if found is module] == [module]
        del model
        assert not [found for found, _ in live_replicas() if found is module]
    assert counts[1] == counts[2]
