"""What users do to models and optimizers under sharded placements: it works as under "ddp", or is refused by name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline import Agreement
from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import CollectiveMismatch, ModelMismatch, NotWhole, UnreducedGradients, UsageError
from tests.models import DDP, Grads, assert_same_bits, draw, mlp, needs_masters, seeded

SHARDED = ("zero1", "zero2", "zero3")
ADAMW = torch.optim.AdamW

Loop = Callable[[Any, Any, int], object]

pytestmark = pytest.mark.parametrize("placement", SHARDED)


def net() -> nn.Sequential:
    return mlp(8, 64, 64, 5)


def weights_of(model: Any) -> Grads:
    with model.whole():
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def backward(model: Any, seed: int) -> None:
    model(draw(seed, 4, 8)).square().mean().backward()


def train(model: Any, optimizer: Any, rank: int, steps: int = 3) -> None:
    for number in range(steps):
        backward(model, 10 * rank + number)
        optimizer.step()
        optimizer.zero_grad()


def assert_as_ddp(
    placement: str,
    loop: Loop = train,
    size: int = 2,
    *,
    module: Callable[[], nn.Module] = net,
    master: torch.dtype | None = None,
    **arguments: Any,
) -> None:
    def body(which: str) -> Callable[[Transport], Grads]:
        def ranks(transport: Transport) -> Grads:
            model = DDP(module(), transport=transport, placement=which, timeout=20, **arguments)
            loop(model, model.optimizer(ADAMW, lr=0.01, master=master), transport.rank)
            return weights_of(model)

        return ranks

    expected, found = run(body("ddp"), size), run(body(placement), size)
    for mine in found:
        assert_same_bits(mine, expected[0])


# ---- gradients


@pytest.mark.parametrize("how", ["none", "zero_", "model", "some", "replaced"])
def test_gradients_that_users_set_through_parameters(placement: str, how: str) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(4):
            backward(model, 10 * rank + number)
            if how == "some":
                model.module[2].weight.grad = None
            if how == "replaced":
                for param in model.parameters():
                    param.grad = torch.ones(param.shape)
            optimizer.step()
            if how == "none":
                for param in model.parameters():
                    param.grad = None
            elif how == "zero_":
                for param in model.parameters():
                    param.grad.zero_()
            else:
                model.zero_grad(set_to_none=how != "model")
        optimizer.step()  # on zeros, or on nothing

    assert_as_ddp(placement, loop)


def test_parameters_that_are_frozen_and_unfrozen_while_training(placement: str) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(4):
            model.module[2].requires_grad_(number % 2 == 0)
            backward(model, 10 * rank + number)
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop)


def test_hooks_that_users_put_on_parameters(placement: str) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        seen: list[Any] = []
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 2)
            param.register_post_accumulate_grad_hook(seen.append)
        train(model, optimizer, rank)
        assert len(seen) == 3 * 6

    assert_as_ddp(placement, loop)


def test_what_was_not_finite_does_not_stay_in_shared_memory_of_buckets(placement: str) -> None:
    """Buckets that have their memory in turn have gaps between gradients, where those of other buckets were."""

    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(4):
            out = model(draw(10 * rank + number, 4, 8))
            (out * torch.inf if rank and number == 1 else out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    agreement = Agreement(not_finite="skip", patience=2)
    assert_as_ddp(placement, loop, agreement=agreement, bucket_cap_mb=0.01, module=lambda: mlp(8, 64, 64, 64, 5))


def test_an_infinity_in_the_shard_of_one_rank_stops_the_step_of_all(placement: str) -> None:
    def body(transport: Transport) -> tuple[list[float], Grads]:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scales, before = [], {}
        for number in range(4):
            scaler.scale(model(draw(10 * transport.rank + number, 4, 8)).square().mean()).backward()
            if number == 2:
                before = weights_of(model)
                if transport.rank == 0:
                    next(p for p in optimizer.param_groups[0]["params"] if p.numel()).grad[0] = torch.inf
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if number == 2:
                assert_same_bits(weights_of(model), before)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, weights_of(model)

    (scales, weights), (others, other_weights) = run(body, 2)
    assert scales == others == [16.0, 16.0, 8.0, 8.0]
    assert_same_bits(weights, other_weights)


@pytest.mark.parametrize("master", [None, pytest.param(torch.float64, marks=needs_masters)])
def test_a_closure_that_clips(placement: str, master: torch.dtype | None) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(3):

            def closure(seed: int = 10 * rank + number) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(draw(seed, 4, 8)).square().mean()
                loss.backward()
                model.clip_grad_norm_(1e4)
                return loss

            optimizer.step(closure)

    assert_as_ddp(placement, loop, master=master)


# ---- parameters


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.other_type = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.cat([x, self.nothing]) * self.scale + self.other_type.sum().float()


@pytest.mark.parametrize("size", [2, 5])
def test_scalars_and_empty_parameters(placement: str, size: int) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        train(model, optimizer, rank)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, rank)

    assert_as_ddp(placement, loop, size, module=Odd)


def test_convolutions_in_channels_last(placement: str) -> None:
    def convolutions() -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 48, 3), nn.Conv2d(48, 48, 3)]
        module: Any = seeded(nn.Sequential(*layers))
        return nn.Sequential(*module.to(memory_format=torch.channels_last))

    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for number in range(3):
            model(draw(10 * rank + number, 2, 3, 9, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop, module=convolutions)


def test_parameters_that_are_views_of_one_tensor(placement: str) -> None:
    def flat() -> nn.Module:
        module = net()
        params = list(module.parameters())
        parts = torch.cat([p.detach().reshape(-1) for p in params]).split([p.numel() for p in params])
        for param, part in zip(params, parts, strict=True):
            param.data = part.view(param.shape)
        return module

    assert_as_ddp(placement, module=flat)


@needs_masters
def test_master_weights_beside_parameters_that_need_none(placement: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
            seeded(self)

        def forward(self, x: torch.Tensor) -> Any:
            return self.narrow(self.wide(x).bfloat16()).float()

    assert_as_ddp(placement, module=Mixed, master=torch.float32)


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class TakesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: Opaque) -> Opaque:
        return Opaque(torch.tanh(self.layer(given.x)))


def test_units_with_outputs_that_nobody_can_look_into(placement: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(TakesOpaque() for _ in range(3))
            seeded(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = Opaque(x)
            for layer in self.layers:
                given = layer(given)
            return given.x

    assert_as_ddp(placement, module=Model)


def test_changes_and_steps_inside_whole(placement: str) -> None:
    def loop(model: Any, optimizer: Any, rank: int) -> None:
        with model.whole():
            for param in model.module.parameters():
                param.data = param.data.clone().clamp(-0.3, 0.3)
            train(model, optimizer, rank)
            with torch.no_grad():
                for param in model.module.parameters():
                    param.mul_(0.9)
        train(model, optimizer, rank)

    assert_as_ddp(placement, loop)


# ---- copies


def test_averages_and_copies_of_the_module(placement: str) -> None:
    def body(which: str) -> Callable[[Transport], Grads]:
        def ranks(transport: Transport) -> Grads:
            model = DDP(net(), transport=transport, placement=which, timeout=20)
            optimizer = model.optimizer(ADAMW, lr=0.01)
            with model.whole():
                average = AveragedModel(model.module)
            for _ in range(3):
                train(model, optimizer, transport.rank, 1)
                with model.whole():
                    average.update_parameters(model.module)
                    copied = pickle.loads(pickle.dumps(model.module))
            train(model, optimizer, transport.rank)
            return {"average": average(draw(1, 2, 8)).detach(), "copy": copied(draw(1, 2, 8)).detach()}

        return ranks

    assert_same_bits(run(body(placement), 2)[1], run(body("ddp"), 2)[0])


def test_copies_that_cannot_be_had(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(ADAMW)
        assert model.optimizer(optimizer) is optimizer
        with pytest.raises(UsageError, match=r"keep its state_dict\(\)"):
            copy.deepcopy(optimizer)
        if placement == "zero3":
            with pytest.raises(NotWhole, match="model.whole"):
                copy.deepcopy(model.module)
            with pytest.raises(UnreducedGradients, match="assign=True"):
                model.module.load_state_dict(net().state_dict(), assign=True)
        else:
            model.double()
            with pytest.raises(UsageError, match="convert the module before"):
                model(draw(0, 4, 8).double())

    run(body, 2)


# ---- optimizers


def test_frozen_parameters_in_an_optimizer(placement: str) -> None:
    def body(which: str) -> Callable[[Transport], Grads]:
        def ranks(transport: Transport) -> Grads:
            module = net()
            module[0].requires_grad_(False)
            model = DDP(module, transport=transport, placement=which, timeout=20)
            optimizer = model.optimizer(ADAMW, model.parameters(), lr=0.01)
            train(model, optimizer, transport.rank)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer, transport.rank)
            return weights_of(model)

        return ranks

    assert_same_bits(run(body(placement), 2)[1], run(body("ddp"), 2)[0])


def test_state_that_does_not_fit_is_refused_before_anything_is_loaded(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(ADAMW, lr=0.01)
        train(model, optimizer, transport.rank)
        before = copy.deepcopy(optimizer.state_dict())
        other = copy.deepcopy(before)
        other["state"][2]["exp_avg"] = torch.zeros(3, 3)
        with pytest.raises(UsageError, match=r"exp_avg of shape \[3, 3\] for 2.weight"):
            optimizer.load_state_dict(other)
        with pytest.raises(UsageError, match="exp_avg_sq for 0.weight, and ShardedSGD keeps momentum_buffer"):
            model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9).load_state_dict(before)
        for index, values in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, before["state"][index][key]) for key, value in values.items())

    run(body, 2)


def test_ranks_with_different_settings_are_told(placement: str) -> None:
    def optimizers(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        with pytest.raises(ModelMismatch, match="class is AdamW on rank 0 and SGD on rank 1"):
            model.optimizer(torch.optim.SGD if transport.rank else ADAMW, lr=0.1)
        with pytest.raises(ModelMismatch, match=r"lr of group 0 is 0.2 on rank 0 and 0.1 on rank 1"):
            model.optimizer(ADAMW, lr=0.1 if transport.rank else 0.2)
        some = list(model.parameters())[transport.rank :]
        with pytest.raises(ModelMismatch, match="params of group 0"):
            model.optimizer(ADAMW, some)

    def placements(transport: Transport) -> None:
        with pytest.raises(ModelMismatch, match="placement="):
            DDP(net(), transport=transport, placement=placement if transport.rank else "ddp", timeout=20)

    def units(transport: Transport) -> None:
        module = net()
        with pytest.raises(ModelMismatch, match="units="):
            DDP(module, transport=transport, placement="zero3", units=[module[2 * transport.rank]], timeout=20)

    for body in (optimizers, placements, units):
        run(body, 2)


def test_a_rank_that_steps_alone_is_told(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(ADAMW, lr=0.01)
        backward(model, transport.rank)
        if transport.rank == 0:
            optimizer.step()
        backward(model, transport.rank)

    with pytest.raises(CollectiveMismatch):
        run(body, 2)


def test_ranks_that_add_different_groups_are_told(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(ADAMW, list(model.module[0].parameters()), lr=0.01)
        optimizer.add_param_group({"params": list(model.module[2].parameters())})
        with pytest.raises(ModelMismatch, match="lr of group 2 is 0.1 on rank 0 and 0.2 on rank 1"):
            optimizer.add_param_group({"params": list(model.module[4].parameters()), "lr": 0.1 + 0.1 * transport.rank})

    run(body, 2)


@needs_masters
def test_groups_that_are_added_later_have_masters_too(placement: str) -> None:
    def body(which: str) -> Callable[[Transport], Any]:
        def ranks(transport: Transport) -> Any:
            module = net().bfloat16()
            model = DDP(module, transport=transport, placement=which, timeout=20)
            optimizer = model.optimizer(ADAMW, list(module[0].parameters()), lr=0.01, master=torch.float32)
            optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.0001})
            for number in range(6):
                model(draw(10 * transport.rank + number, 4, 8).bfloat16()).float().square().mean().backward()
                module[2].bias.grad = None
                optimizer.step()
                model.zero_grad()
            return weights_of(model) | {"master": optimizer.state_dict()["state"][2]["master"]}

        return ranks

    assert_same_bits(run(body(placement), 2)[1], run(body("ddp"), 2)[0])


@needs_masters
def test_masters_of_what_another_optimizer_updates(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net().bfloat16(), transport=transport, placement=placement, timeout=20)
        first = model.optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(UsageError, match="asked for 0.weight, which another optimizer updates"):
            model.optimizer(ADAMW, master=torch.float32)
        del first
        both = model.optimizer(ADAMW, master=torch.float32), model.optimizer(torch.optim.SGD, master=torch.float32)
        for ours, other in zip(*(optimizer.param_groups[0]["params"] for optimizer in both), strict=True):
            assert ours is other

    run(body, 2)


def test_norms_that_cannot_be_had_over_shards(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(net(), transport=transport, placement=placement, timeout=20)
        with pytest.raises(UsageError, match="norm_type=0"):
            model.clip_grad_norm_(1.0, 0)

    run(body, 2)
