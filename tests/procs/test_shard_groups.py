"""Shards over some of the ranks: `shard=K`. The other ranks hold the same shards, and the numbers are those of ddp."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import Checkpointer, digest
from paceline.collectives import TorchDistTransport
from paceline.collectives.group import Group
from paceline.collectives.reduction import GradBucket
from paceline.collectives.subgroup import ShardGroups
from paceline.strategies.scatter_mean import HybridMean
from tests.models import draw, mlp
from tests.pool import Pool
from tests.procs.test_placement_corners import Experts

CPU = torch.device("cpu")
SHARDED = ("zero1", "zero2", "zero3")
TRANSPORTS = ("shm", "torch")


def train(
    rank: int, size: int, placement: str, shard: int | None, transport: str, clips: bool, dtype: str = "float32"
) -> dict[str, Any]:
    """The weights after some steps, the whole state of the optimizer, and how much of it this rank holds."""
    kind = getattr(torch, dtype)
    arguments: dict[str, Any] = {"placement": placement, "shard": shard, "transport": transport, "timeout": 20}
    model = paceline.DistributedDataParallel(mlp(9, 700, 64, 5).to(kind), **arguments)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01, master=None if dtype == "float32" else torch.float32)
    norms = []
    for number in range(6):
        for microbatch in range(2):
            model.require_backward_grad_sync = microbatch == 1
            model(draw(100 * rank + 10 * number + microbatch, 4, 9).to(kind)).float().square().mean().backward()
        if clips:
            norms.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    with model.whole():
        weights = [param.detach().double().tolist() for param in model.module.parameters()]
    state = [
        {key: value.double().tolist() for key, value in values.items() if isinstance(value, torch.Tensor)}
        for values in optimizer.state_dict()["state"].values()
    ]
    return {"weights": weights, "state": state, "held": held, "norms": norms}


def assert_close(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_four_ranks_in_two_shard_groups_train_as_ddp(procs: Pool, transport: str) -> None:
    """To the last bit over shared memory, where all ranks are added in one order."""
    expected = procs(4).run(train, "ddp", None, transport, False)[0]
    for placement in SHARDED:
        found = procs(4).run(train, placement, 2, transport, False)
        for one in found:
            assert (one["weights"], one["state"]) == (found[0]["weights"], found[0]["state"])
            if transport == "shm":
                assert (one["weights"], one["state"]) == (expected["weights"], expected["state"])
            assert_close(one["weights"], expected["weights"])
        assert [one["held"] for one in found[:2]] == [one["held"] for one in found[2:]]
        assert max(one["held"] for one in found) < 0.6 * expected["held"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_clipping_counts_every_shard_once(procs: Pool, transport: str) -> None:
    expected = procs(4).run(train, "ddp", None, transport, True)[0]
    for placement in ("zero1", "zero3"):
        for one in procs(4).run(train, placement, 2, transport, True):
            assert_close([one["norms"]], [expected["norms"]])
            assert_close(one["weights"], expected["weights"])


def test_master_weights_with_shard_groups(procs: Pool) -> None:
    """Over shared memory bfloat16 gradients are added in float32, over all ranks, and rounded once."""
    expected = procs(4).run(train, "ddp", None, "shm", False, "bfloat16")[0]
    for one in procs(4).run(train, "zero2", 2, "shm", False, "bfloat16"):
        assert (one["weights"], one["state"]) == (expected["weights"], expected["state"])


@pytest.mark.parametrize("placement", ["ddp", *SHARDED])
def test_shards_over_one_rank_are_ddp(procs: Pool, placement: str) -> None:
    expected = procs(2).run(train, "ddp", None, "shm", True)
    assert procs(2).run(train, placement, 1, "shm", True) == expected


def copied(rank: int, size: int, copies: int) -> tuple[str, bool, bool]:
    model = paceline.DistributedDataParallel(mlp(9, 700, 64, 5), placement="zero2", copies=copies)
    return model._placement.name, model.whole_among([0, 3]), model.whole_among([1, 3])


def test_so_many_ranks_hold_each_shard(procs: Pool) -> None:
    assert procs(4).run(copied, 2) == [("zero2", True, False)] * 4
    assert procs(4).run(copied, 4) == [("ddp", True, True)] * 4


def wrap(rank: int, size: int, shards: tuple[Any, ...], **arguments: Any) -> str:
    shard = shards[rank % len(shards)]
    model = paceline.DistributedDataParallel(mlp(9, 64, 5), **{"placement": "zero2", "shard": shard, **arguments})
    return type(model).__name__


@pytest.mark.parametrize(
    ("ranks", "shards", "text"),
    [
        (3, (2,), r"shard=2 does not divide the world of 3 ranks.*one of 1, 3"),
        (2, (4,), r"shard=4 does not divide"),
        (2, (0,), r"shard=0 is not a number of ranks"),
        (2, (True,), r"shard=True is not a number of ranks"),
        (4, (2, 4), r"shard=2 on rank 0, shard=4 on rank 1"),
        (2, (1, 2), r"shard=1 on rank 0, shard=2 on rank 1"),
        (3, (2, 3), r"shard=2 on rank 0, shard=3 on rank 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_on_every_rank(
    procs: Pool, ranks: int, shards: tuple[Any, ...], text: str
) -> None:
    for outcome in procs(ranks).attempt(wrap, shards):
        assert isinstance(outcome.error, paceline.errors.PacelineError)
        assert re.search(text, str(outcome.error)), outcome.error


def overflow_in_one_shard(rank: int, size: int, transport: str) -> list[float]:
    model = paceline.DistributedDataParallel(mlp(8, 64, 64, 5), placement="zero3", shard=2, transport=transport)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scales = []
    for number in range(4):
        scaler.scale(model(draw(10 * rank + number, 4, 8)).square().mean()).backward()
        if number == 2 and rank == 2:
            next(p for p in optimizer.param_groups[0]["params"] if p.numel()).grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    with model.whole():
        return [*scales, *(float(param.detach().double().sum()) for param in model.module.parameters())]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_skip_a_step_that_one_would_skip(procs: Pool, transport: str) -> None:
    first, *others = procs(4).run(overflow_in_one_shard, transport)
    assert first[:4] == [16.0, 16.0, 8.0, 8.0]
    assert all(other == first for other in others)


def take_another_expert(rank: int, size: int, transport: str) -> None:
    model = paceline.DistributedDataParallel(Experts(8), placement="zero3", shard=2, transport=transport, timeout=5)
    model(draw(rank, 4, 8), 0).sum().backward()
    model(draw(rank, 4, 8), int(rank == 3)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_run_other_units_are_named_by_their_own_numbers(procs: Pool, transport: str) -> None:
    outcomes = procs(4).attempt(take_another_expert, transport)
    for one in outcomes[2:]:
        assert isinstance(one.error, paceline.errors.CollectiveMismatch)
        assert re.search("rank [23] is gathering the parameters of experts.* while rank [23]", str(one.error))
    for one in outcomes[:2]:
        assert isinstance(one.error, paceline.errors.CollectiveError)


def fail_in_backward(rank: int, size: int, transport: str) -> None:
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    model = paceline.DistributedDataParallel(net, placement="zero3", shard=2, transport=transport, timeout=5)
    if rank == 3:
        net[2].register_full_backward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):  # a script that goes on after an error
        model(draw(rank, 4, 40)).sum().backward()
    model(draw(rank, 4, 40))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_backward_ends_every_shard_group(procs: Pool, transport: str) -> None:
    *others, failed = procs(4).attempt(fail_in_backward, transport)
    assert isinstance(failed.error, paceline.errors.IllegalMove) and "restart all ranks" in str(failed.error)
    assert all(isinstance(one.error, paceline.errors.PacelineError) and one.seconds < 20 for one in others), others


def save_and_load(rank: int, size: int, folder: str, placement: str, shard: int | None, load: str) -> list[str]:
    model = paceline.DistributedDataParallel(mlp(9, 700, 5), placement=placement, shard=shard, timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    found = []
    if load:
        Checkpointer(load).load(model=model, optimizer=optimizer)
        found.append(digest(model, optimizer, 0))
    for number in range(2):
        model(draw(10 * rank + number, 4, 9)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        assert checkpointer.save(1, model=model, optimizer=optimizer).problem is None
    return [*found, digest(model, optimizer, 0)]


def test_checkpoints_move_between_shard_groups_and_other_placements(procs: Pool, tmp_path: Path) -> None:
    saved, path = "", ""
    for number, (ranks, placement, shard) in enumerate(
        [(4, "zero3", 2), (2, "ddp", None), (4, "zero1", 2), (3, "zero3", None), (4, "zero2", 2)]
    ):
        target = str(tmp_path / str(number))
        told = procs(ranks).run(save_and_load, target, placement, shard, path)
        assert all(one == told[0] for one in told)
        assert not path or told[0][0] == saved
        path, saved = target, told[0][-1]


def train_in_lanes(rank: int, size: int, placement: str, shard: int | None) -> str:
    model = paceline.DistributedDataParallel(mlp(9, 700, 5), placement=placement, shard=shard, lanes=4, timeout=20)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    for step in range(3):
        for inputs in model.lanes((draw(10 * step + lane, 4, 9) for lane in model.own_lanes), step):
            model(inputs).square().mean().backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer, 0)


def test_lanes_have_the_digest_of_ddp(procs: Pool) -> None:
    expected = procs(2).run(train_in_lanes, "ddp", None)[0]
    for placement in SHARDED:
        assert procs(4).run(train_in_lanes, placement, 2) == [expected] * 4


def drift(
    rank: int, size: int, placement: str, transport: str, where: str, at: int, settings: dict[str, Any]
) -> list[float]:
    """One rank changes one number of what it holds."""
    model = paceline.DistributedDataParallel(
        mlp(9, 700, 5),
        placement=placement,
        shard=2,
        transport=transport,
        timeout=20,
        agreement=paceline.Agreement(state_every=4, **settings),
    )
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    for number in range(12):
        model(draw(10 * rank + number, 4, 9)).square().mean().backward()
        if number == 3 and rank == at:
            own = next(p for p in optimizer.param_groups[0]["params"] if p.numel() > 100)
            changed = own if where == "block" else optimizer.state[own]["exp_avg"]
            changed.data[7] += 1.0
        optimizer.step()
        optimizer.zero_grad()
    with model.whole():
        return [float(param.detach().double().sum()) for param in model.module.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("placement", "where"), [("zero1", "block"), ("zero1", "state"), ("zero3", "block")])
def test_a_shard_that_drifts_is_found_by_its_twin(procs: Pool, transport: str, placement: str, where: str) -> None:
    outcomes = procs(4).attempt(drift, placement, transport, where, 3, {})
    for one in outcomes:
        assert isinstance(one.error, paceline.errors.ReplicaDrift), one
        assert re.search("ranks 1 and 3 differ|ranks 0 and 1; ranks 2 and 3", str(one.error)), one.error
        assert "bit" in str(one.error)


def test_a_shard_is_healed_from_the_twin_in_the_trusted_shard_group(procs: Pool) -> None:
    for placement in ("zero2", "zero3"):
        found = procs(4).run(drift, placement, "shm", "state", 3, {"drift": "heal", "trust": 0})
        assert all(one == found[0] for one in found)


def ask_who_is_whole(rank: int, size: int, placement: str, shard: int | None) -> list[bool]:
    model = paceline.DistributedDataParallel(mlp(9, 700, 5), placement=placement, shard=shard)
    return [model.whole_among(ranks) for ranks in ([0], [0, 1], [1, 3], [0, 3], [0, 1, 2, 3], [])]


def test_a_step_is_whole_where_every_shard_is(procs: Pool) -> None:
    whole = [True, True, True, True, True, False]
    assert procs(4).run(ask_who_is_whole, "ddp", None) == [whole] * 4
    assert procs(4).run(ask_who_is_whole, "zero2", 1) == [whole] * 4
    assert procs(4).run(ask_who_is_whole, "zero3", 2) == [[False, True, False, True, True, False]] * 4
    assert procs(4).run(ask_who_is_whole, "zero1", None) == [[False, False, False, False, True, False]] * 4


def reduce_over_hosts(rank: int, size: int) -> tuple[list[float], list[str]]:
    """As between hosts of two ranks each: shared memory in a shard group, gloo between twins."""
    base = TorchDistTransport(dist.distributed_c10d._get_default_group())
    groups = ShardGroups.of(base, 2, "auto", {CPU}, 20.0)
    groups = replace(groups, twins=ShardGroups.of(base, 2, "torch", {CPU}, 20.0).twins)
    found: list[float] = []
    for dtype in (None, torch.float64):
        flat = torch.arange(1000, dtype=torch.float32) * (rank + 1)
        spans = (((0, 100), (200, 500)), ((100, 200), (500, 1000)))
        reduction = HybridMean(groups, CPU, dtype)
        if not reduction.divides(base, CPU):
            flat /= size
        flight = reduction(GradBucket(0, flat, [], [], last=True, spans=spans), base)
        Group(base).wait(flight.work, "a bucket")
        flight.result()
        own = torch.cat([flat[slice(*span)] for span in spans[rank % 2]])
        expected = torch.cat([torch.arange(*span) * 2.5 for span in spans[rank % 2]])
        found.append(float((own - expected).abs().max()))
    kinds = [type(group.transport).__name__ for group in (groups.shard, groups.twins)]
    return found, kinds


def test_shard_groups_inside_hosts(procs: Pool) -> None:
    for found, kinds in procs(4).run(reduce_over_hosts):
        assert kinds == ["ShmTransport", "SubgroupTransport"]
        assert max(found) < 1e-3
