"""Communication hooks and `reduction=` under sharded placements: the bits of "ddp", or refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
)

from paceline.errors import NotWhole, UsageError
from paceline.strategies.names import NAMES
from tests.models import DDP, Grads, assert_close, assert_same_bits, draw, packed, seeded, unpacked
from tests.pool import Pool
from tests.procs.test_reductions import reduction_of
from tests.procs.test_replica_hooks import allreduce, built_in, fp16, fp16_around_allreduce, of_the_user, power_sgd

SHARDED = ("zero1", "zero2", "zero3")
HOOKS = {hook.__name__: hook for hook in (allreduce, built_in, fp16, fp16_around_allreduce, of_the_user, power_sgd)}
# What it leaves out of a bucket depends on what else is in it, and buckets are those of units under "zero3".
BY_BUCKET = {"topk"}
# It waits in backward for ranks that may wait for this one there, where parameters are gathered.
WAITS = {"power_sgd"}


def net() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
    return seeded(nn.Sequential(*layers, nn.Linear(16, 100), nn.Linear(100, 3)))


def trained(rank: int, placement: str, transport: str, way: str, shard: int | None = None) -> Grads:
    reduction = None if way in HOOKS else reduction_of(way)
    model = DDP(
        net(),
        placement=placement,
        shard=shard,
        transport=transport,
        reduction=reduction,
        bucket_plan="fixed",
        bucket_cap_mb=0.01,
        timeout=20,
    )
    if way in HOOKS:
        HOOKS[way](model)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    for number in range(4):
        model(draw(10 * rank + number, 4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.whole():
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def all_ways(rank: int, size: int, transport: str, placements: tuple[str, ...]) -> list[tuple[str, str, bytes, bytes]]:
    """With every hook and reduction, the weights under "ddp" and under the placements."""
    found = []
    for way in (*HOOKS, *(name for name in NAMES if name != "mean")):
        expected = packed(trained(rank, "ddp", transport, way))
        tried = [one for one in placements if one != "zero3" or way not in WAITS]
        found += [(way, one, expected, packed(trained(rank, one, transport, way))) for one in tried]
    return found


@pytest.mark.parametrize(("transport", "placements"), [("torch", SHARDED), ("shm", ("zero3",))])
def test_hooks_and_reductions_have_the_bits_of_ddp(procs: Pool, transport: str, placements: tuple[str, ...]) -> None:
    here, there = procs(2).run(all_ways, transport, placements)
    for (way, placement, expected, mine), (_, _, _, other) in zip(here, there, strict=True):
        assert_same_bits(unpacked(mine), unpacked(other))
        if placement != "zero3" or way not in BY_BUCKET:
            assert_same_bits(unpacked(mine), unpacked(expected))


def in_shard_groups(rank: int, size: int) -> list[tuple[str, bytes, bytes]]:
    """Both reduce over all ranks; what a rank keeps is its shard, of its shard group."""
    return [
        (way, packed(trained(rank, "ddp", "torch", way)), packed(trained(rank, placement, "torch", way, shard=2)))
        for way in ("allreduce", "fixed-order")
        for placement in ("zero1", "zero3")
    ]


def test_hooks_and_reductions_in_shard_groups(procs: Pool) -> None:
    """Where the order of ranks is fixed, in bits: a ring's depends on the place in the bucket."""
    for results in procs(4).run(in_shard_groups):
        for way, expected, found in results:
            check = assert_same_bits if way == "fixed-order" else assert_close
            check(unpacked(found), unpacked(expected))


def refused(rank: int, size: int, placement: str) -> list[str]:
    model = DDP(net(), placement=placement, timeout=20)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=3)
    stepping: Any = SimpleNamespace(functional_optimizer=None, params_to_optimize=None)
    found = []
    for given, hook in (
        (state, post_localSGD_hook.post_localSGD_hook),
        (None, debugging_hooks.noop_hook),
        (None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, stepping)),
    ):
        with pytest.raises(UsageError) as caught:
            model.register_comm_hook(given, hook)
        found.append(str(caught.value))
    if placement == "zero3":
        with pytest.raises(UsageError, match="powerSGD_hook, which waits for others in backward, cannot be combined"):
            power_sgd(model)
    model.register_comm_hook(None, default_hooks.allreduce_hook)  # the way is free for another one
    model(draw(rank, 4, 16)).sum().backward()
    return found


@pytest.mark.parametrize("placement", SHARDED)
def test_hooks_that_do_more_than_reduce_are_refused_by_name(procs: Pool, placement: str) -> None:
    for local, noop, stepping in procs(2).run(refused, placement):
        assert local.startswith("the communication hook post_localSGD_hook, which averages over some of the ranks")
        assert noop.startswith("the communication hook noop_hook, which does not reduce gradients")
        assert "hook_then_optimizer_wrapper, which updates whole parameters inside backward" in stepping
        assert all(
            text.endswith(f'cannot be combined with placement="{placement}"; use placement="ddp"')
            for text in (local, noop, stepping)
        )


def read_parameters(rank: int, size: int, placement: str) -> float:
    """The sum of the parameters of all buckets, as a hook sees them."""
    model = DDP(net(), placement=placement, timeout=20)
    seen: list[torch.Tensor] = []

    def look(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes = [param.shape for param in bucket.parameters()]
        assert shapes == [grad.shape for grad in bucket.gradients()]
        seen.extend(param.detach().sum() for param in bucket.parameters())
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, look)
    model(draw(rank, 4, 16)).sum().backward()
    return float(sum(seen))


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_a_hook_may_read_parameters_that_are_there(procs: Pool, placement: str) -> None:
    expected = float(sum(param.detach().double().sum() for param in net().parameters()))
    assert procs(2).run(read_parameters, placement) == pytest.approx([expected] * 2, rel=1e-4)


def test_a_hook_is_told_of_parameters_in_shards(procs: Pool) -> None:
    """It would read the NaN that stands in their place."""
    for outcome in procs(2).attempt(read_parameters, "zero3"):
        assert isinstance(outcome.error, NotWhole) and "the parameter" in str(outcome.error)
