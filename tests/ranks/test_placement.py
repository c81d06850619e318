"""Sharded placements in the corners: accumulation, weights, unused parameters, lanes, other optimizers, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import NotWhole, UnreducedGradients, UsageError
from tests.models import DDP, Branches, Grads, assert_same_bits, draw, mlp, needs_masters, seeded

SHARDED = ("zero1", "zero2", "zero3")
ADAMW = torch.optim.AdamW

Loop = Callable[[Any, torch.optim.Optimizer, int], object]


def weights_of(model: Any) -> Grads:
    with model.whole():
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def trained(
    loop: Loop, size: int = 2, *, net: Callable[[], nn.Module] = lambda: mlp(9, 700, 5), **arguments: Any
) -> Any:
    """The weights of every rank after `loop`, under "ddp" and under the placement."""

    def body(placement: str) -> Callable[[Transport], Grads]:
        def train(transport: Transport) -> Grads:
            model = DDP(mlp(9, 700, 5) if net is None else net(), transport=transport, placement=placement, **arguments)
            loop(model, model.optimizer(ADAMW, lr=0.01), transport.rank)
            return weights_of(model)

        return train

    return lambda placement: run(body(placement), size)


def assert_as_ddp(placement: str, loop: Loop, size: int = 2, **arguments: Any) -> None:
    weights = trained(loop, size, **arguments)
    expected, found = weights("ddp"), weights(placement)
    for mine in found:
        assert_same_bits(mine, expected[0])


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(draw(seed, 4, 9)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("placement", SHARDED)
def test_accumulation(placement: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            for microbatch in range(3):
                model.require_backward_grad_sync = microbatch == 2
                model(draw(100 * rank + 10 * number + microbatch, 4, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop)


@pytest.mark.parametrize("placement", SHARDED)
def test_thrown_away_microbatches(placement: str) -> None:
    """zero_grad() of the optimizer throws away what was not reduced, though it has the shards alone."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            with model.no_sync():
                model(draw(70 + number, 4, 9)).square().mean().backward()
            optimizer.zero_grad()
            step(model, optimizer, 10 * rank + number)

    assert_as_ddp(placement, loop)


@pytest.mark.parametrize("placement", SHARDED)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model(placement: str, set_to_none: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            model(draw(10 * rank + number, 4, 9)).square().mean().backward()
            optimizer.step()
            model.zero_grad(set_to_none=set_to_none)

    assert_as_ddp(placement, loop)


@pytest.mark.parametrize("placement", SHARDED)
def test_two_reduced_backwards_of_one_step_are_added(placement: str) -> None:
    def body(transport: Transport) -> list[torch.Tensor]:
        model = DDP(mlp(9, 700, 5), transport=transport, placement=placement)
        optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
        before = weights_of(model)
        for number in range(2):
            model(draw(10 * transport.rank + number, 4, 9)).square().mean().backward()
        optimizer.step()
        after = weights_of(model)
        return [
            was - now for was, now in zip(before.values(), after.values(), strict=True) if was is not None is not now
        ]

    bare = mlp(9, 700, 5)
    for seed in (0, 1, 10, 11):
        (bare(draw(seed, 4, 9)).square().mean() / 2).backward()
    for mine in run(body, 2):
        for change, param in zip(mine, bare.parameters(), strict=True):
            torch.testing.assert_close(change, param.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("placement", SHARDED)
def test_weights_of_microbatches(placement: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            with model.weight(rank + 1):
                model(draw(10 * rank + number, rank + 1, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop)


def test_weighted_accumulation() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            for microbatch in range(2):
                model.require_backward_grad_sync = microbatch == 1
                with model.weight(rank + 1):
                    model(draw(100 * rank + 10 * number + microbatch, rank + 1, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp("zero1", loop)
    with pytest.raises(UsageError, match='"zero2"'):
        trained(loop)("zero2")


@pytest.mark.parametrize("placement", SHARDED)
def test_unused_parameters(placement: str) -> None:
    """A parameter that some ranks use, and one that no rank uses, whose state stays as it was."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(4):
            uses = ("ta" if rank else "tb") if number % 2 else "t"
            model(draw(10 * rank + number, 4, 3), uses).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop, net=Branches)


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_a_skipped_batch(placement: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            if rank == number % 2:
                model.skip_batch()
            else:
                model(draw(10 * rank + number, 4, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop)


@pytest.mark.parametrize(
    ("placement", "size"), [(p, n) for p in SHARDED for n in (1, 2, 3, 4) if (p, n) != ("zero3", 3)]
)
def test_lanes_have_the_bits_of_any_world(placement: str, size: int) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            for batch in model.lanes([draw(10 * number + lane, 2, 9) for lane in model.own_lanes], number):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    expected = trained(loop, 1, lanes=4)("ddp")[0]
    for mine in trained(loop, size, lanes=4)(placement):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("placement", SHARDED)
def test_clipping_by_the_norm_of_all_shards(placement: str) -> None:
    def body(which: str) -> Callable[[Transport], tuple[list[float], Grads]]:
        def train(transport: Transport) -> tuple[list[float], Grads]:
            model = DDP(mlp(9, 700, 5), transport=transport, placement=which)
            optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
            found = []
            for number, order in enumerate((2.0, 1.0, float("inf"))):
                model(draw(10 * transport.rank + number, 4, 9)).square().mean().backward()
                found.append(float(model.clip_grad_norm_(0.05, order)))
                optimizer.step()
                optimizer.zero_grad()
            return found, weights_of(model)

        return train

    expected, found = run(body("ddp"), 2)[0], run(body(placement), 2)
    for mine, weights in found:
        assert mine == pytest.approx(expected[0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", SHARDED)
def test_a_whole_gradient_is_refused_by_name(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 700, 5), transport=transport, placement=placement)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        model(draw(0, 4, 9)).sum().backward()
        with pytest.raises(NotWhole, match="clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(NotWhole, match=r"model\.optimizer"):
            plain.step()

    run(body, 2)


@pytest.mark.parametrize("placement", SHARDED)
def test_a_norm_of_the_shards_of_one_rank_is_refused(placement: str) -> None:
    """A framework that clips what its optimizer has would scale the gradients by another number on every rank."""

    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 700, 5), transport=transport, placement=placement)
        optimizer = model.optimizer(ADAMW)
        for _ in range(2):  # an update does not take the guard away
            model(draw(transport.rank, 4, 9)).square().mean().backward()
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None]
            with pytest.raises(NotWhole, match=r"model.clip_grad_norm_\(\)"):
                nn.utils.clip_grad_norm_(params, 1.0)
            with pytest.raises(NotWhole, match=r"model.clip_grad_norm_\(\)"):
                torch._foreach_norm(grads)
            for grad in (grads[0].detach().data, grads[0].double()):
                with pytest.raises(NotWhole, match=r"model.clip_grad_norm_\(\)"):
                    grad.norm(2)
            nn.utils.clip_grad_value_(params, 0.5)  # which every rank does with its part
            assert copy.deepcopy(grads[0]).sum() == grads[0].sum()
            optimizer.step()
            kept = [value for state in optimizer.state.values() for value in state.values()]
            assert {type(value) for value in kept} == {torch.Tensor}

    run(body, 2)


@pytest.mark.parametrize("placement", SHARDED)
def test_optimizers_that_look_at_whole_tensors_are_refused(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 700, 5), transport=transport, placement=placement)
        for cls in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam):
            with pytest.raises(UsageError, match=f"{cls.__name__} cannot update blocks"):
                model.optimizer(cls)
        for other in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adadelta):
            assert isinstance(model.optimizer(other), other)

    run(body, 2)


@pytest.mark.parametrize("placement", SHARDED)
def test_an_optimizer_that_was_made_before_is_converted(placement: str) -> None:
    def body(which: str) -> Callable[[Transport], Grads]:
        def train(transport: Transport) -> Grads:
            model = DDP(mlp(9, 700, 5), transport=transport, placement=which)
            layers: Any = [{"params": list(layer.parameters())} for layer in model.module if list(layer.parameters())]
            made = ADAMW([layers[0], {**layers[1], "lr": 0.1}], lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            optimizer = model.optimizer(made)
            assert optimizer is made
            for number in range(4):
                step(model, optimizer, 10 * transport.rank + number)
                schedule.step()
            assert optimizer.param_groups[1]["lr"] == 0.1 / 16
            return weights_of(model)

        return train

    expected, found = run(body("ddp"), 2), run(body(placement), 2)
    for mine in found:
        assert_same_bits(mine, expected[0])


@pytest.mark.parametrize("placement", SHARDED)
def test_state_goes_from_every_placement_to_every_other(placement: str) -> None:
    """Two steps of ddp, then two of the placement on three ranks, then two of a plain optimizer on one."""

    def part(which: str, weights: Any, state: Any, first: int) -> Callable[[Transport], tuple[Any, Any]]:
        def train(transport: Transport) -> tuple[Any, Any]:
            net = mlp(9, 700, 5)
            if weights is not None:
                net.load_state_dict(weights)
            model = DDP(net, transport=transport, placement=which)
            optimizer = model.optimizer(ADAMW, lr=0.01)
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))  # ranks are threads, and torch does not copy
            for number in (first, first + 1):
                step(model, optimizer, number)  # the same data on all ranks: the number of ranks plays no part
            return weights_of(model), optimizer.state_dict()

        return train

    expected, _ = run(part("ddp", *run(part("ddp", *run(part("ddp", None, None, 0), 2)[0], 2), 2)[0], 4), 2)[0]
    weights, state = run(part(placement, *run(part("ddp", None, None, 0), 2)[0], 2), 2)[1]
    found, _ = run(part("ddp", weights, state, 4), 2)[0]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("placement", SHARDED)
def test_changed_parameters_are_followed(placement: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        step(model, optimizer, rank)
        with torch.no_grad(), model.whole():
            for param in model.module.parameters():
                param.clamp_(-0.1, 0.1)
        step(model, optimizer, 10 + rank)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        step(model, optimizer, 20 + rank)

    assert_as_ddp(placement, loop)


def test_a_parameter_with_other_memory_is_followed() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        step(model, optimizer, rank)
        for param in model.module.parameters():
            param.data = param.data.clone()
        step(model, optimizer, 20 + rank)

    for placement in ("zero1", "zero2"):
        assert_as_ddp(placement, loop)


@needs_masters
def test_whole_gradients_beside_masters_are_zeroed_and_kept() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 70, 5).bfloat16(), transport=transport)
        model.optimizer(torch.optim.SGD, lr=1e-3, master=torch.float32)
        model(draw(0, 4, 9).bfloat16()).sum().backward()
        model.zero_grad(set_to_none=False)
        assert all(param.grad is not None and not param.grad.any() for param in model.module.parameters())

    run(body, 2)


@pytest.mark.parametrize("placement", ["ddp", *SHARDED])
@needs_masters
def test_masters_follow_changed_weights(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 700, 5).bfloat16(), transport=transport, placement=placement)
        optimizer = model.optimizer(torch.optim.SGD, lr=1e-6, master=torch.float32)
        with torch.no_grad(), model.whole():
            for param in model.module.parameters():
                param.fill_(0.5)
        model(draw(0, 4, 9).bfloat16()).sum().backward()
        optimizer.step()
        assert all(bool((weight == 0.5).all()) for weight in weights_of(model).values() if weight is not None)
        masters = [value for group in optimizer.param_groups for value in group["params"]]
        assert all(value.dtype is torch.float32 for value in masters)
        assert any(bool((value != 0.5).any()) for value in masters)

    run(body, 2)


@pytest.mark.parametrize("placement", SHARDED)
def test_what_cannot_be_had_is_refused_before_training(placement: str) -> None:
    def body(transport: Transport) -> None:
        with pytest.raises(UsageError, match="sparse"):
            DDP(nn.Embedding(4, 8, sparse=True), transport=transport, placement=placement)
        model = DDP(mlp(9, 700, 5), transport=transport, placement=placement)
        with pytest.raises(UsageError, match="join"):
            model.join_hook()
        with pytest.raises(UsageError, match="does not train"):
            model.optimizer(ADAMW, [nn.Parameter(torch.zeros(3))])
        optimizer = model.optimizer(ADAMW)
        with model.no_sync():
            model(draw(0, 4, 9)).sum().backward()
            with pytest.raises(NotWhole, match="no_sync"):
                optimizer.step()

    run(body, 2)
    with pytest.raises(UsageError, match="lanes=4 over 3 ranks"):
        run(lambda transport: DDP(mlp(9, 4), transport=transport, placement="zero3", lanes=4), 3)
    with pytest.raises(UsageError, match="accepted: 'ddp', 'zero1', 'zero2', 'zero3'"):
        run(lambda transport: DDP(mlp(9, 4), transport=transport, placement="zero9"), 2)


class Layers(nn.Module):
    """Equal layers, which are units, and a parameter beside them."""

    def __init__(self, count: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(count))
        self.spare = nn.Parameter(torch.ones(40))
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.spare


@pytest.mark.parametrize("placement", SHARDED)
def test_a_parameter_that_one_rank_leaves_out_does_not_stop_the_others(placement: str) -> None:
    """Its bucket leaves at the end on one rank and at once on the other, with many units between."""

    class LeavesOut(Layers):
        def forward(self, x: torch.Tensor, uses: bool = True) -> torch.Tensor:
            for layer in self.layers[:-1]:
                x = torch.tanh(layer(x))
            last: Any = self.layers[-1]
            return last(x, uses) * self.spare  # type: ignore[no-any-return]

    class WithoutBias(nn.Linear):
        def forward(self, x: torch.Tensor, uses: bool = True) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias if uses else None)

    def net() -> nn.Module:
        made = LeavesOut()
        made.layers[-1] = seeded(WithoutBias(40, 40))
        return made

    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            model(draw(10 * rank + number, 4, 40), uses=rank == 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp(placement, loop, net=net, units=[nn.Linear], timeout=20)


@pytest.mark.parametrize("placement", SHARDED)
def test_gradients_that_come_late(placement: str) -> None:
    """Reentrant checkpoints that share a weight deliver more for it after its bucket was reduced."""

    class Twice(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in (0, 1, 2, 3, 4, 5, 0):
                layer = self.layers[number]
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
            return x * self.spare

    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            model(draw(10 * rank + number, 4, 40).requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    weights = trained(loop, net=Twice, bucket_cap_mb=0.005)
    expected, found = weights("ddp"), weights(placement)
    for name, weight in found[0].items():  # what is late, and so added last, depends on the buckets
        torch.testing.assert_close(weight, expected[0][name], rtol=1e-5, atol=1e-6)
    assert_same_bits(*found)


@pytest.mark.parametrize("placement", ["ddp", *SHARDED])
@needs_masters
def test_the_guard_sees_optimizers_with_master_weights(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(9, 700, 5).bfloat16(), transport=transport, placement=placement, overlap=False)
        optimizer = model.optimizer(ADAMW, master=torch.float32)
        model(draw(0, 4, 9).bfloat16()).sum().backward()
        with pytest.raises(UnreducedGradients):
            optimizer.step()
        model.sync_gradients()
        optimizer.step()

    run(body, 2)


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_two_replicas_in_one_loss(placement: str) -> None:
    """One rank uses both, the other only the second."""

    def body(transport: Transport) -> tuple[Grads, Grads]:
        one = DDP(Layers(), transport=transport, placement=placement, bucket_cap_mb=0.005, timeout=20)
        two = DDP(Layers(), transport=transport, placement=placement, bucket_cap_mb=0.005, timeout=20)
        both = one.optimizer(ADAMW), two.optimizer(ADAMW)
        for number in range(3):
            x = draw(10 * transport.rank + number, 4, 40)
            first, loss = one(x).square().mean(), two(x).square().mean()
            (loss + first if transport.rank == 0 else loss).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(one), weights_of(two)

    first, second = run(body, 2)
    assert_same_bits(first[1], second[1])


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_reductions_without_a_backward_of_their_own(placement: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            model(draw(10 * rank + number, 4, 9)).square().mean().backward()
            model.sync_gradients()
            model(draw(50 + 10 * rank + number, 4, 9)).square().mean().backward()
            model.sync_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    weights = trained(loop, overlap=False)
    expected, found = weights("ddp"), weights(placement)
    for mine in found:
        for name, weight in mine.items():
            torch.testing.assert_close(weight, expected[0][name], rtol=1e-4, atol=1e-5)
    assert_same_bits(*found)


def test_a_unit_is_there_until_its_inputs_have_their_gradients() -> None:
    """What has been kept of a parameter without a gradient to it is still needed for the gradient of the input."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.bias.detach())

    def net() -> nn.Module:
        made = Layers()
        made.layers = nn.ModuleList(seeded(Scaled(40, 40)) for _ in range(4))
        return made

    def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for number in range(3):
            with model.no_sync():
                model(draw(90 + 10 * rank + number, 4, 40)).square().mean().backward()
            if model._owned is not None:
                assert not any(unit.gathered for unit in model._owned.units._units)
            model(draw(10 * rank + number, 4, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_ddp("zero3", loop, net=net)


@pytest.mark.parametrize("placement", SHARDED)
def test_units_inside_units_and_an_optimizer_that_replaces_values(placement: str) -> None:
    class Replacing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data = param.data - group["lr"] * param.grad

    def body(which: str) -> Callable[[Transport], Grads]:
        def train(transport: Transport) -> Grads:
            net = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(3)))
            model = DDP(seeded(net), transport=transport, placement=which, units=[nn.Sequential, nn.Linear])
            optimizer = model.optimizer(Replacing, lr=1e-9)
            for number in range(3):
                model(draw(10 * transport.rank + number, 4, 40)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights_of(model)

        return train

    expected = run(body("ddp"), 2)[0]
    for mine in run(body(placement), 2):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("placement", ["zero2", "zero3"])
def test_only_buckets_that_are_under_way_have_memory_beside_them(placement: str) -> None:
    def body(transport: Transport) -> list[int]:
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        model: Any = DDP(net, transport=transport, placement=placement, bucket_cap_mb=0.01, bucket_plan="fixed")
        found: list[int] = []

        def count(_: torch.Tensor) -> None:
            found.append(sum(bucket.flight is not None for bucket in model._core.bucket_set.buckets))

        inputs = draw(transport.rank, 4, 64).requires_grad_()
        inputs.register_hook(count)  # all buckets but the last ones have left
        model(inputs).square().mean().backward()
        assert len(model._core.bucket_set.buckets) >= 8
        return found

    for (found,) in run(body, 2):
        assert found <= 2


@pytest.mark.skipif(hasattr(torch.empty(0), "grad_dtype"), reason="this torch can have masters")
def test_masters_are_refused_by_a_torch_that_cannot_have_them() -> None:
    def body(transport: Transport) -> None:
        model = DDP(nn.Linear(4, 2).bfloat16(), transport=transport)
        with pytest.raises(UsageError, match="Tensor.grad_dtype"):
            model.optimizer(torch.optim.AdamW, master="float32")

    run(body, 2)
