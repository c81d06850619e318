"""`reduce_dtype=`: in which type gradients are summed, under every placement."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline.strategies.cast import Wire
from tests.models import mlp
from tests.pool import Pool

PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")
# Of four ranks, in the order of ranks. In bfloat16 8 - 8 + 2**-9 is what is left, but 2**-9 + 8 is 8.
PARTS = (2.0**-9, 8.0, -8.0, 2.0**-9)


def reduce(
    rank: int, size: int, placement: str, shard: int | None, transport: str, dtype: str, kind: str
) -> list[float]:
    """The largest and smallest mean of gradients that are alike on a rank: PARTS[rank]."""
    net = nn.Linear(300, 64, bias=False).to(getattr(torch, kind))
    model = paceline.DistributedDataParallel(
        net, placement=placement, shard=shard, transport=transport, reduce_dtype=dtype or None, timeout=20
    )
    optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
    with model.whole():
        net.weight.data.zero_()
    (model(torch.ones(1, 300, dtype=getattr(torch, kind))).sum() * PARTS[rank]).backward()
    optimizer.step()
    with model.whole():
        return [float(net.weight.detach().min()), float(net.weight.detach().max())]


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bfloat16_is_summed_in_float32_and_rounded_once(procs: Pool, transport: str, placement: str) -> None:
    for shard in (None, 2) if placement != "ddp" else (None,):
        found = procs(4).run(reduce, placement, shard, transport, "float32", "bfloat16")
        assert found == [[-(2.0**-10)] * 2] * 4, (placement, shard)


def test_without_it_sums_over_gloo_are_rounded_on_the_way(procs: Pool) -> None:
    assert procs(4).run(reduce, "ddp", None, "torch", "", "bfloat16") != [[-(2.0**-10)] * 2] * 4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_float32_can_be_summed_in_another_type(procs: Pool, placement: str) -> None:
    """What bfloat16 cannot hold is gone, and float64 loses nothing."""
    for dtype in ("bfloat16", "float64"):
        found = procs(2).run(reduce_two, placement, dtype)
        expected = -1.0 if dtype == "bfloat16" else -1.0 - 2.0**-20
        assert found == [expected] * 2, (placement, dtype)


def reduce_two(rank: int, size: int, placement: str, dtype: str) -> float:
    net = nn.Linear(300, 64, bias=False)
    model = paceline.DistributedDataParallel(net, placement=placement, reduce_dtype=getattr(torch, dtype), timeout=20)
    optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
    with model.whole():
        net.weight.data.zero_()
    (model(torch.ones(1, 300)).sum() * (1.0 + 2.0**-20)).backward()
    optimizer.step()
    with model.whole():
        return float(net.weight.detach().max())


def refused(rank: int, size: int, arguments: dict[str, Any], hook: bool) -> str:
    try:
        model = paceline.DistributedDataParallel(mlp(9, 5), **{"reduce_dtype": "float32", **arguments})
        if hook:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    except paceline.errors.UsageError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("arguments", "hook", "text"),
    [
        ({}, True, "a communication hook cannot be combined with reduce_dtype=torch.float32"),
        ({"reduction": Wire(torch.bfloat16)}, False, "cannot be combined with reduction="),
        ({"lanes": 4}, False, "cannot be combined with lanes="),
        ({"reduce_dtype": "float31"}, False, "reduce_dtype='float31' is not a floating point type"),
        ({"reduce_dtype": torch.int32}, False, "reduce_dtype=torch.int32 is not a floating point type"),
    ],
)
def test_what_decides_about_the_type_itself_is_refused(
    procs: Pool, arguments: dict[str, Any], hook: bool, text: str
) -> None:
    assert all(re.search(text, found) for found in procs(2).run(refused, arguments, hook))


def differ(rank: int, size: int) -> None:
    paceline.DistributedDataParallel(mlp(9, 5), reduce_dtype="float64" if rank else "float32")


def test_ranks_with_different_types_are_told(procs: Pool) -> None:
    for outcome in procs(2).attempt(differ):
        assert isinstance(outcome.error, paceline.errors.ModelMismatch) and "reduce_dtype=" in str(outcome.error)
