"""Replicas start equal: the same model on every rank, then the same values."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import ModelMismatch, ReplicasDiffer
from paceline.strategies.cast import Wire
from tests.models import DDP, assert_same_bits, mlp, seeded, values


def normed(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), seed)


# ------------------------------------------------------------------------------------------------------------ values


def test_broadcast_starts_from_rank_0_with_parameters_and_buffers() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = normed(seed=transport.rank)
        module.get_buffer("1.num_batches_tracked").fill_(transport.rank + 5)
        return values(DDP(module, transport=transport))

    expected = values(normed(seed=0))
    expected["1.num_batches_tracked"].fill_(5)
    for got in run(body, 3):
        assert_same_bits(dict(got), dict(expected))


def test_broadcast_keeps_strides_and_dtypes() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = nn.Module()
        module.a = nn.Parameter(torch.full((3, 2), float(transport.rank)).t())
        module.b = nn.Parameter(torch.full((2, 2), transport.rank + 1j))
        module.c = nn.Parameter(torch.full((2, 3, 2, 2), float(transport.rank)).to(memory_format=torch.channels_last))
        module.d = nn.Parameter(torch.empty(0, 2))
        model = DDP(module, transport=transport)
        assert model.module.a.stride() == (1, 2)
        assert model.module.c.is_contiguous(memory_format=torch.channels_last)
        return values(model)

    for got in run(body, 2):
        assert torch.equal(got["a"], torch.zeros(2, 3))
        assert torch.equal(got["b"], torch.full((2, 2), 1j))
        assert not got["c"].any()


def test_ignored_parameters_and_buffers_are_left_alone() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = normed(seed=transport.rank)
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "1.running_mean"])
        return values(DDP(module, transport=transport))

    own = values(normed(seed=1))
    theirs = values(normed(seed=0))
    got = run(body, 2)[1]
    for name in ("0.weight", "1.running_mean"):
        assert torch.equal(got[name], own[name])
    for name in ("0.bias", "1.running_var"):
        assert torch.equal(got[name], theirs[name])


def test_init_sync_false_changes_nothing_and_says_nothing() -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        return values(DDP(mlp(2, 2, seed=transport.rank), transport=transport, init_sync=False))

    for rank, got in enumerate(run(body, 2)):
        assert_same_bits(dict(got), dict(values(mlp(2, 2, seed=rank))))


# ------------------------------------------------------------------------------------------------------------ verify


def verify(change: Callable[[nn.Module, int], None], size: int = 3) -> list[str]:
    """Wrap with init="verify" after `change(module, rank)`; what every rank was told. Nothing may be overwritten."""

    def body(transport: Transport) -> str:
        module = normed()
        with torch.no_grad():
            change(module, transport.rank)
        before = values(module)
        try:
            DDP(module, transport=transport, init="verify")
        except ReplicasDiffer as error:
            assert isinstance(error, ValueError)
            return str(error)
        finally:
            for name, value in values(module).items():
                assert torch.equal(value, before[name]) or value.isnan().any(), f"{name} was overwritten"
        return ""

    return run(body, size)


def test_verify_names_parameter_ranks_element_and_remedy_on_every_rank() -> None:
    def change(module: nn.Module, rank: int) -> None:
        if rank == 2:
            module.get_parameter("0.bias")[1] += 0.25
            module.get_parameter("1.weight")[0] -= 2.0

    messages = verify(change)
    assert len(set(messages)) == 1
    for part in (
        "rank 2 differs from ranks 0 and 1 in 0.bias. The first difference is element [1]: ",
        "2 of 7 tensors differ, also 1.weight, on rank 2",
        "set the same seed before building the model",
    ):
        assert part in messages[0]


def test_verify_names_every_rank_that_differs() -> None:
    def change(module: nn.Module, rank: int) -> None:
        module.get_parameter("0.weight")[0, 0] += max(0, rank - 2)

    assert "ranks 3 and 4 differ, each in its own way, from ranks 0, 1 and 2 in 0.weight" in verify(change, 5)[0]


def test_verify_looks_at_buffers_too() -> None:
    def change(module: nn.Module, rank: int) -> None:
        module.get_buffer("1.running_mean")[0] += rank

    assert "1.running_mean" in verify(change)[0]


@pytest.mark.parametrize("where", ["on rank 1", "on rank 0"])
def test_verify_sees_a_nan_on_one_rank_and_says_so(where: str) -> None:
    def change(module: nn.Module, rank: int) -> None:
        if where == f"on rank {rank}":
            module.get_parameter("0.weight")[0, 0] = float("nan")

    (message, *_) = verify(change, 2)
    assert "ranks 0 and 1 differ in 0.weight" in message
    assert f"nan (0x7fc00000) {where}" in message


def test_verify_is_silent_for_equal_values() -> None:
    def change(module: nn.Module, rank: int) -> None:
        """Nothing."""

    assert verify(change) == ["", "", ""]


def test_verify_takes_the_same_nan_everywhere_for_equal() -> None:
    def change(module: nn.Module, rank: int) -> None:
        module.get_parameter("0.weight")[0, 0] = float("nan")

    assert verify(change) == ["", "", ""]


def test_a_verified_replica_trains() -> None:
    def body(transport: Transport) -> float:
        model = DDP(mlp(2, 1), transport=transport, init="verify")
        model(torch.full((1, 2), float(transport.rank))).sum().backward()
        return float(model.module[0].weight.grad[0, 0])

    assert run(body, 2) == [0.5, 0.5]


# --------------------------------------------------------------------------------------------------------- structure


def named(*names: str, **changes: Any) -> nn.Module:
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(2, 3)))
    for name, parameter in changes.items():
        module.register_parameter(name, parameter)
    return module


def with_buffers(**buffers: torch.Tensor) -> nn.Module:
    module = named("a")
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def both(module: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    return module, module


# what differs: (model of rank 0, model of the others, arguments of the others, what the message names)
Case = tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Any], list[str]]
MISMATCHES: dict[str, Case] = {
    "name": (lambda: named("a", "b"), lambda: named("a", "c"), {}, [" b", " c", "rank 1"]),
    "order": (lambda: named("a", "b"), lambda: named("b", "a"), {}, [" a", " b", "rank 1"]),
    "fewer": (lambda: named("a", "b"), lambda: named("a"), {}, ["2 ", " 1", " b", "rank 1"]),
    "more": (lambda: named("a"), lambda: named("a", "x"), {}, ["1 ", " 2", " x", "rank 1"]),
    "shape": (
        lambda: named("a", "b"),
        lambda: named("a", b=nn.Parameter(torch.zeros(3, 2))),
        {},
        [" b ", "shape", "[2, 3]", "[3, 2]", "rank 1"],
    ),
    "dtype": (
        lambda: named("a"),
        lambda: named(a=nn.Parameter(torch.zeros(2, 3).double())),
        {},
        [" a ", "torch.float32", "torch.float64", "rank 1"],
    ),
    "stride": (
        lambda: named("a"),
        lambda: named(a=nn.Parameter(torch.zeros(3, 2).t())),
        {},
        [" a ", "strides", "[3, 1]", "[1, 2]", "rank 1"],
    ),
    "requires_grad": (
        lambda: named("a", "b"),
        lambda: named("a", b=nn.Parameter(torch.zeros(2, 3), requires_grad=False)),
        {},
        [" b ", "requires_grad", "True", "False", "rank 1"],
    ),
    "no parameters": (lambda: named("a"), lambda: named(), {}, ["1 ", " 0", "rank 1"]),
    "buffer shape": (
        lambda: with_buffers(m=torch.zeros(2)),
        lambda: with_buffers(m=torch.zeros(3)),
        {},
        [" m ", "shape", "[2]", "[3]", "rank 1"],
    ),
    "buffer dtype": (
        lambda: with_buffers(m=torch.zeros(2)),
        lambda: with_buffers(m=torch.zeros(2).double()),
        {},
        [" m ", "torch.float32", "torch.float64", "rank 1"],
    ),
    "buffer missing": (lambda: with_buffers(m=torch.zeros(2)), lambda: with_buffers(), {}, ["m"]),
    "init": (*both(lambda: named("a")), {"init": "verify"}, ["init=broadcast on rank 0", "init=verify on rank 1"]),
    "overlap": (*both(lambda: named("a")), {"overlap": False}, ["overlap=True on rank 0", "overlap=False on rank 1"]),
    "unused": (*both(lambda: named("a")), {"unused": "error"}, ["unused=zero on rank 0", "unused=error on rank 1"]),
    "bucket sizes": (*both(lambda: named("a")), {"bucket_cap_mb": 3}, ["bucket sizes", "rank 1"]),
    "reduction": (*both(lambda: named("a")), {"reduction": Wire(torch.bfloat16)}, ["reduction", "rank 1"]),
    "buffer sync": (*both(lambda: named("a")), {"forward_sync_buffers": False}, ["forward_sync_buffers", "rank 1"]),
    "skipping": (
        *both(lambda: named("a")),
        {"skip_all_reduce_unused_params": True},
        ["skip_all_reduce_unused_params", "rank 1"],
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_wrap_different_things_all_learn_it_at_once(what: str) -> None:
    first, others, arguments, parts = MISMATCHES[what]

    def body(transport: Transport) -> str:
        module = first() if transport.rank == 0 else others()
        with pytest.raises(ModelMismatch) as caught:
            DDP(module, transport=transport, **(arguments if transport.rank else {}))
        return str(caught.value)

    started = time.monotonic()
    messages = run(body, 3)
    assert time.monotonic() - started < 2
    assert len(set(messages)) == 1
    for part in parts:
        assert part in messages[0]


def test_the_rank_that_differs_is_named_also_when_it_is_the_last() -> None:
    def body(transport: Transport) -> str:
        module = named("a", "b") if transport.rank < 2 else named("a", "z")
        with pytest.raises(ModelMismatch) as caught:
            DDP(module, transport=transport)
        return str(caught.value)

    assert all("rank 2" in message and " z" in message for message in run(body, 3))


def test_a_timeout_may_differ() -> None:
    run(lambda transport: DDP(named("a"), transport=transport, timeout=5.0 + transport.rank), 2)
