"""All kinds of parameters, gradients and graphs: the mean over ranks is the mean over ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.strategies.cast import Wire
from tests.models import DDP, Branches, Grads, assert_close, assert_same_bits, draw, grads, mean_grads, mlp, seeded

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "a bucket each": {"bucket_cap_mb": 1e-6},
    "explicit": {"overlap": False},
    "static graph": {"static_graph": True},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS)
Loss = Callable[[Any, int], torch.Tensor]


def batch(rank: int) -> torch.Tensor:
    return draw(rank, 2, 3)


def check(
    build: Callable[[], nn.Module], loss: Loss, settings: str = "default", *, exact: bool = True, steps: int = 3
) -> None:
    """Two ranks that run `loss(model, rank)` and its backward end with the mean, in every one of `steps` steps."""

    def body(transport: Transport) -> list[Grads]:
        model = DDP(build(), transport=transport, **SETTINGS[settings])
        results = []
        for _ in range(steps):
            model.zero_grad()
            loss(model, transport.rank).backward()
            if settings == "explicit":
                model.sync_gradients()
            results.append(grads(model))
        return results

    expected = mean_grads(build(), loss, 2)
    first, second = run(body, 2)
    for got, same in zip(first, second, strict=True):
        (assert_same_bits if exact else assert_close)(got, expected)
        assert_same_bits(same, got)


def summed(model: Any, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(rank)).square().sum()
    return out


# --------------------------------------------------------------------------------------------------------- parameters


def half_frozen() -> nn.Module:
    module = mlp(3, 4, 2)
    module[0].requires_grad_(False)
    return module


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x).tanh())


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(3, 3, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        )
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()  # type: ignore[arg-type]
        return x.float()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
        self.real = nn.Linear(3, 3)
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.real(x).to(torch.complex64) @ self.wave).abs()
        return out


class Shapes(nn.Module):
    """A scalar, an empty one, a transposed one, one with gaps, one that is a view of another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(draw(1, 3, 3).t())
        self.gaps = nn.Parameter(draw(2, 3, 6)[:, ::2])
        self.single = nn.Parameter(draw(3, 1, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.transposed * self.scalar @ self.gaps * self.single.flatten()
        return torch.cat([out, self.empty])


def channels_last() -> nn.Module:
    module = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    return seeded(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": half_frozen,
    "tied": Tied,
    "mixed dtypes": MixedTypes,
    "complex": Complex,
    "shapes": Shapes,
    "channels_last": channels_last,
    "double": lambda: mlp(3, 4, 2).double(),
    "bfloat16": lambda: mlp(3, 4, 2).to(torch.bfloat16),
}


@every_setting
@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str, settings: str) -> None:
    def loss(model: Any, rank: int) -> torch.Tensor:
        dtype = {"double": torch.float64, "bfloat16": torch.bfloat16}.get(name, torch.float32)
        out: torch.Tensor = model(batch(rank).to(dtype)).square().sum()
        return out

    check(MODELS[name], loss, settings)


def test_frozen_parameters_have_no_gradient_and_no_bucket() -> None:
    def body(transport: Transport) -> list[str]:
        model = DDP(half_frozen(), transport=transport)
        summed(model, 0).backward()
        assert model.module[0].weight.grad is None
        return [meta.name for meta in model._core.bucket_set.layout.params]

    assert run(body, 1) == [["2.weight", "2.bias"]]


def test_gradients_have_the_strides_of_their_parameters() -> None:
    def body(transport: Transport) -> None:
        model = DDP(channels_last(), transport=transport)
        summed(model, 0).backward()
        weight = model.module[1].weight
        assert weight.grad.stride() == weight.stride()
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)

    run(body, 2)


def test_a_parameter_frozen_after_wrapping_counts_as_unused() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport)
        model.module.b.requires_grad_(False)
        summed(model, transport.rank).backward()
        assert model.module.b.weight.grad is None
        assert model.module.a.weight.grad is not None

    run(body, 2)


# ------------------------------------------------------------------------------------------------------------- sparse


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")
        self.out = nn.Linear(3, 2)
        seeded(self)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.out(self.words(ids).sum(1).tanh() + self.bag(ids))


def sparse_loss(model: Any, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(torch.tensor([[1, rank + 2], [rank, 9]])).square().sum()
    return out


@every_setting
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients(settings: str) -> None:
    check(Sparse, sparse_loss, settings)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients_stay_sparse_and_accumulate() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Sparse(), transport=transport)
        with model.no_sync():
            sparse_loss(model, transport.rank).backward()
        sparse_loss(model, transport.rank).backward()
        assert model.module.words.weight.grad.is_sparse
        return {name: None if grad is None else grad.to_dense() for name, grad in grads(model).items()}

    twice = mean_grads(Sparse(), lambda m, rank: sparse_loss(m, rank) + sparse_loss(m, rank), 2)
    for got in run(body, 2):
        assert_close(got, {name: None if grad is None else grad.to_dense() for name, grad in twice.items()})


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("everywhere", [False, True])
def test_sparse_gradients_may_be_missing(everywhere: bool) -> None:
    def loss(model: Any, rank: int) -> torch.Tensor:
        if rank == 0 and not everywhere:
            return sparse_loss(model, rank)
        inner = getattr(model, "module", model)
        out: torch.Tensor = inner.out(batch(rank)).square().sum()
        return out

    check(Sparse, loss)


# ------------------------------------------------------------------------------------------------- checkpointed graphs


class Checkpointed(nn.Module):
    """Three layers of which some, or all, are computed again in backward. `order` may use a layer twice."""

    def __init__(self, kind: str, order: str, checkpointed: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.order, self.checkpointed, self.reentrant = order, checkpointed, kind == "reentrant"
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant and not x.requires_grad:
            x = x.clone().requires_grad_()  # as reentrant checkpointing needs it
        for name in self.order:
            layer = self.get_submodule(name)
            if name in self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
            else:
                x = layer(x).tanh()
        return x


CHECKPOINTS = {
    "one layer": ("abc", "b"),
    "the first layer": ("abc", "a"),
    "the last layer": ("abc", "c"),
    "all layers": ("abc", "abc"),
    "a layer used twice": ("abcb", "b"),
    "layers used twice": ("abcabc", "abc"),
    "twice in a row": ("abbc", "b"),
    "once plain, once again": ("babcb", "ac"),
}


@every_setting
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointing(name: str, kind: str, settings: str) -> None:
    # A nested backward delivers the gradients of its layer's uses one by one, so they are added in another order.
    check(lambda: Checkpointed(kind, *CHECKPOINTS[name]), summed, settings, exact=False)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointing_of_a_module_called_directly(name: str, kind: str) -> None:
    def body(transport: Transport) -> Grads:
        # Nothing tells of the outer backward here, so a nested one may be reduced by itself: right, if not as fast.
        model = DDP(Checkpointed(kind, *CHECKPOINTS[name]), transport=transport)
        summed(model.module, transport.rank).backward()
        return grads(model)

    expected = mean_grads(Checkpointed(kind, *CHECKPOINTS[name]), summed, 2)
    for got in run(body, 2):
        assert_close(got, expected)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_checkpointing_with_accumulation_and_weights(kind: str) -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(Checkpointed(kind, "abcabc", "abc"), transport=transport, bucket_cap_mb=1e-6)
        with model.no_sync(), model.weight(1 + transport.rank):
            summed(model, transport.rank).backward()
        with model.weight(2):
            summed(model, transport.rank + 2).backward()
        return grads(model)

    alone = Checkpointed(kind, "abcabc", "abc")
    for rank in range(2):
        (summed(alone, rank) * (1 + rank) / 7).backward()
        (summed(alone, rank + 2) * 2 / 7).backward()
    for got in run(body, 2):
        assert_close(got, grads(alone))


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_a_whole_replica_may_be_checkpointed(kind: str) -> None:
    def loss(model: Any, rank: int) -> torch.Tensor:
        x = batch(rank).requires_grad_()
        out: torch.Tensor = checkpoint(model, x, use_reentrant=kind == "reentrant").square().sum()
        return out

    check(lambda: mlp(3, 4, 2), loss)


# --------------------------------------------------------------------------------------- forwards, backwards, and more


def test_several_forwards_before_one_backward() -> None:
    check(
        lambda: mlp(3, 4, 2),
        lambda model, rank: (model(batch(rank)) * model(batch(rank + 5)) + model(batch(rank + 9))).square().sum(),
    )


def test_several_forwards_then_several_backwards() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        first, second = summed(model, transport.rank), summed(model, transport.rank + 5)
        second.backward()
        first.backward()
        return grads(model)

    expected = mean_grads(mlp(3, 4, 2), lambda model, rank: summed(model, rank) + summed(model, rank + 5), 2)
    for got in run(body, 2):
        assert_close(got, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_backwards_of_one_step_add_up(size: int) -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport, bucket_cap_mb=1e-6)
        for _ in range(2):
            model.zero_grad()
            loss = summed(model, transport.rank)
            loss.backward(retain_graph=True)
            loss.backward()
            summed(model, transport.rank + 5).backward()
        return grads(model)

    expected = mean_grads(mlp(3, 4, 2), lambda m, rank: 2 * summed(m, rank) + summed(m, rank + 5), size)
    for got in run(body, size):
        assert_close(got, expected)


@every_setting
def test_autograd_grad_in_between_reduces_nothing(settings: str) -> None:
    def loss(model: Any, rank: int) -> torch.Tensor:
        inner = getattr(model, "module", model)
        local = torch.autograd.grad(summed(model, rank), list(inner.parameters()))
        assert all(param.grad is None for param in inner.parameters())
        assert all(grad.any() for grad in local)
        return summed(model, rank)

    check(lambda: mlp(3, 4, 2), loss, settings)


@every_setting
def test_a_gradient_penalty(settings: str) -> None:
    def loss(model: Any, rank: int) -> torch.Tensor:
        x = batch(rank).requires_grad_()
        out = model(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        total: torch.Tensor = out + slope.square().sum()
        return total

    check(lambda: mlp(3, 4, 2), loss, settings)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_backward_that_makes_a_graph_of_itself() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        for _ in range(2):
            model.zero_grad()
            summed(model, transport.rank).backward(create_graph=True)
        assert not any(param.grad.requires_grad for param in model.parameters())
        return grads(model)

    expected = mean_grads(mlp(3, 4, 2), summed, 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


def test_backward_for_chosen_inputs_alone() -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport)
        summed(model, transport.rank).backward(inputs=[model.module[0].weight])
        return grads(model)

    expected = mean_grads(mlp(3, 4, 2), summed, 2)
    for got in run(body, 2):
        assert_same_bits(got, {n: g if n == "0.weight" else None for n, g in expected.items()})


def test_hooks_on_tensors_see_their_own_gradients() -> None:
    def body(transport: Transport) -> bool:
        model = DDP(mlp(3, 4, 2), transport=transport)
        seen: list[torch.Tensor] = []
        model.module[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
        summed(model, transport.rank).backward()
        alone = mlp(3, 4, 2)
        summed(alone, transport.rank).backward()
        return torch.equal(seen[0], alone[0].weight.grad)  # type: ignore[arg-type]

    assert run(body, 2) == [True, True]


@pytest.mark.parametrize("registered", ["before wrapping", "after wrapping", "after two steps", "after the forward"])
def test_hooks_after_accumulation_see_the_ranks_own_gradient_and_may_change_it(registered: str) -> None:
    def body(transport: Transport) -> Grads:
        module = mlp(3, 4, 2)

        def double(param: torch.Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(2)

        def register(now: str) -> None:
            if now == registered:
                module[0].weight.register_post_accumulate_grad_hook(double)  # type: ignore[operator]

        register("before wrapping")
        model = DDP(module, transport=transport)
        register("after wrapping")
        if registered in ("after two steps", "after the forward"):
            for _ in range(2):
                summed(model, transport.rank).backward()
                model.zero_grad()
        register("after two steps")
        loss = summed(model, transport.rank)
        register("after the forward")
        loss.backward()
        return grads(model)

    expected = mean_grads(mlp(3, 4, 2), summed, 2)
    changed = expected["0.weight"]
    assert changed is not None
    for got in run(body, 2):
        assert_same_bits(got, {**expected, "0.weight": 2 * changed})


def test_outputs_of_any_shape() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.layer(x)
            return {"a": [x, (x * 2,)], "b": "text", "c": None}

    check(Nested, lambda model, rank: model(batch(rank))["a"][1][0].square().sum())


# ------------------------------------------------------------------------------------------------------ many replicas


@pytest.mark.parametrize("cap", [None, 1e-6], ids=["one bucket", "a bucket each"])
def test_several_replicas_in_one_graph(cap: float | None) -> None:
    def body(transport: Transport) -> list[Grads]:
        parts = [DDP(mlp(3, 3, 3, seed=seed), transport=transport, bucket_cap_mb=cap) for seed in range(3)]
        for _ in range(3):
            for part in parts:
                part.zero_grad()
            nn.Sequential(*parts)(batch(transport.rank)).square().sum().backward()
        return [grads(part) for part in parts]

    whole = nn.Sequential(*(mlp(3, 3, 3, seed=seed) for seed in range(3)))
    expected = mean_grads(whole, summed, 2)
    for results in run(body, 2):
        for index, got in enumerate(results):
            prefix = f"{index}."
            own = {name.removeprefix(prefix): grad for name, grad in expected.items() if name.startswith(prefix)}
            assert_same_bits(got, own)


@pytest.mark.parametrize("uses", [("tab", "tb"), ("tb", "tab"), ("ta", "tb")], ids=str)
def test_several_replicas_in_one_graph_with_unused_parameters_on_some_ranks(uses: tuple[str, str]) -> None:
    def body(transport: Transport) -> list[Grads]:
        encoder = DDP(mlp(3, 3, 3), transport=transport, bucket_cap_mb=1e-6, timeout=5)
        decoder = DDP(Branches(), transport=transport, bucket_cap_mb=1e-6, timeout=5)
        for _ in range(2):
            encoder.zero_grad(), decoder.zero_grad()
            decoder(encoder(batch(transport.rank)), uses[transport.rank]).square().sum().backward()
        return [grads(encoder), grads(decoder)]

    whole = nn.ModuleDict({"encoder": mlp(3, 3, 3), "decoder": Branches()})
    expected = mean_grads(whole, lambda m, rank: m["decoder"](m["encoder"](batch(rank)), uses[rank]).square().sum(), 2)
    for encoder, decoder in run(body, 2):
        assert_same_bits(encoder, {n[8:]: grad for n, grad in expected.items() if n.startswith("encoder.")})
        assert_same_bits(decoder, {n[8:]: grad for n, grad in expected.items() if n.startswith("decoder.")})


def test_a_module_that_is_wrapped_twice_is_reduced_once_by_the_one_called_last() -> None:
    def body(transport: Transport) -> list[Grads]:
        module = mlp(3, 4, 2)
        one, two = (DDP(module, transport=transport, bucket_cap_mb=cap) for cap in (25, 1e-6))
        results = []
        for replica in (two, one, one, two):
            module.zero_grad()
            summed(replica, transport.rank).backward()
            results.append(grads(module))
        assert (one._core.reductions_begun, two._core.reductions_begun) == (2, 2)
        return results

    expected = mean_grads(mlp(3, 4, 2), summed, 2)
    for results in run(body, 2):
        for got in results:
            assert_same_bits(got, expected)


def test_of_two_replicas_of_a_module_the_first_reduces_again_when_the_second_is_gone() -> None:
    def body(transport: Transport) -> None:
        module = mlp(3, 4, 2)
        one = DDP(module, transport=transport)
        two = DDP(module, transport=transport)
        summed(module, 0).backward()  # `two`, made last, reduces
        del two
        summed(module, 0).backward()
        assert one._core.reductions_begun == 1

    run(body, 2)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_wrapped_on_its_own_too_is_reduced_once(part: int) -> None:
    def body(transport: Transport) -> Grads:
        module = nn.Sequential(mlp(3, 3), mlp(3, 2, seed=1))
        alone = DDP(module[part], transport=transport)
        model = DDP(module, transport=transport)
        summed(model, transport.rank).backward()
        del alone
        return grads(model)

    expected = mean_grads(nn.Sequential(mlp(3, 3), mlp(3, 2, seed=1)), summed, 2)
    for got in run(body, 2):
        assert_same_bits(got, expected)


# ---------------------------------------------------------------------------------------------- narrower on the wire


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_mean_may_travel_in_another_type(dtype: torch.dtype) -> None:
    def body(transport: Transport) -> Grads:
        model = DDP(mlp(3, 4, 2), transport=transport, reduction=Wire(dtype))
        summed(model, transport.rank).backward()
        return grads(model)

    def own(rank: int) -> Grads:
        alone = mlp(3, 4, 2)
        summed(alone, rank).backward()
        return {n: None if g is None else (g * 0.5).to(dtype) for n, g in grads(alone).items()}

    halves = [own(0), own(1)]
    for got in run(body, 2):
        for name, grad in got.items():
            one, two = halves[0][name], halves[1][name]
            assert grad is not None and one is not None and two is not None
            assert grad.dtype is torch.float32
            assert torch.equal(grad, (one + two).float())
