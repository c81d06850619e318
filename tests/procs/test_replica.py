"""The wrapper on real processes, next to torch's own class: copies, groups, buffers, join, compile."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import IllegalMove, UsageError
from tests.models import (
    DDP,
    Branches,
    Grads,
    assert_close,
    assert_same_bits,
    draw,
    grads,
    mean_grads,
    mlp,
    packed,
    seeded,
    unpacked,
    values,
)
from tests.pool import Pool

TorchDDP: Any = nn.parallel.DistributedDataParallel


def batch(rank: int, step: int = 0, rows: int = 4) -> torch.Tensor:
    return draw(100 * step + rank, rows, 3)


def train(model: Any, rank: int, steps: int = 3) -> bytes:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return packed(values(model))


def summed_grads(model: Any, rank: int) -> bytes:
    model.zero_grad()
    model(batch(rank)).square().sum().backward()
    return packed(grads(model))


def expected_grads(size: int, module: nn.Module | None = None, first: int = 0) -> Grads:
    return mean_grads(module or mlp(3, 4, 2), lambda model, rank: model(batch(first + rank)).square().sum(), size)


# ------------------------------------------------------------------------------------------------------------- copies


def pickled(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled}


def copy_and_train(rank: int, size: int, how: str) -> tuple[bytes, bytes, bytes]:
    model = DDP(mlp(3, 4, 2), bucket_cap_mb=1e-6)
    train(model, rank)
    before = values(model)
    twin = COPIES[how](model)
    assert type(twin) is DDP
    assert list(twin.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    result = train(twin, rank)
    assert_same_bits(dict(values(model)), dict(before))
    original = TorchDDP(mlp(3, 4, 2), bucket_cap_mb=1e-6)
    train(original, rank)
    torchs = train(COPIES[how](original), rank)
    return result, torchs, train(model, rank)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_a_replica_of_its_own_as_torchs_is(procs: Pool, how: str) -> None:
    results = procs(2).run(copy_and_train, how)
    for got, torchs, original in results:
        assert_same_bits(unpacked(got), unpacked(torchs))
        assert_same_bits(unpacked(original), unpacked(got))
        assert_same_bits(unpacked(got), unpacked(results[0][0]))


def settings_of_a_copy(rank: int, size: int) -> None:
    model = DDP(Branches(), unused="error", bucket_cap_mb=3, overlap=False, guard=False, static_graph=True)
    twin = copy.deepcopy(model)
    assert twin._settings == model._settings
    assert (twin._guard_refuses, twin.static_graph) == (False, True)
    assert twin.bucket_bytes_cap == 3 * 1024 * 1024
    twin.module.b.requires_grad_(False)
    twin(batch(rank)).sum().backward()
    with pytest.raises(RuntimeError, match="b.weight: unused on all ranks"):
        twin.sync_gradients()


def test_a_copy_keeps_its_settings(procs: Pool) -> None:
    procs(2).run(settings_of_a_copy)


def state_dicts(rank: int, size: int) -> None:
    ours, torchs = DDP(mlp(3, 4, 2)), TorchDDP(mlp(3, 4, 2, seed=1))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(ours.state_dict())
    assert_same_bits(dict(values(torchs)), dict(values(ours)))
    ours.load_state_dict(torchs.state_dict())
    assert (ours.training, torchs.training) == (True, True)
    assert ours.eval() is ours
    assert ours.device == torchs.device
    assert (ours.device_ids, ours.output_device, ours.dim) == (torchs.device_ids, torchs.output_device, torchs.dim)
    assert repr(ours) == repr(torchs)


def test_state_dicts_go_both_ways(procs: Pool) -> None:
    procs(2).run(state_dicts)


# ------------------------------------------------------------------------------------------------------------- groups


def in_groups(rank: int, size: int, how: str) -> bytes:
    pair = rank // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if how == "group":
        with pytest.raises(UsageError, match="not a member of the given process_group"):
            DDP(mlp(3, 4, 2), process_group=groups[1 - pair])
        model = DDP(mlp(3, 4, 2, seed=rank), process_group=groups[pair])
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "within"))
        with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
            DDP(mlp(3, 4, 2), device_mesh=mesh)
        model = DDP(mlp(3, 4, 2, seed=rank), device_mesh=mesh["within"])
    first_of_pair = mlp(3, 4, 2, seed=2 * pair)
    assert_same_bits(dict(values(model)), dict(values(first_of_pair)))
    return summed_grads(model, rank)


@pytest.mark.parametrize("how", ["group", "mesh"])
def test_a_replica_works_in_its_group_alone(procs: Pool, how: str) -> None:
    results = procs(4).run(in_groups, how)
    for rank, got in enumerate(results):
        pair = 2 * (rank // 2)
        expected = expected_grads(2, mlp(3, 4, 2, seed=pair), first=pair)
        assert_same_bits(unpacked(got), expected)


def alone(rank: int, size: int, transport: str) -> None:
    model = DDP(mlp(3, 4, 2), transport=transport)
    summed_grads(model, rank)
    assert_same_bits(grads(model), expected_grads(1))


@pytest.mark.parametrize("transport", ["auto", "torch", "local"])
def test_a_world_of_one(procs: Pool, transport: str) -> None:
    procs(1).run(alone, transport)


def local_beside_others(rank: int, size: int) -> None:
    model = DDP(mlp(3, 4, 2, seed=rank), transport="local")
    for one in (model, copy.deepcopy(model)):
        summed_grads(one, 0)
        assert_same_bits(grads(one), expected_grads(1, mlp(3, 4, 2, seed=rank)))


def test_local_ranks_have_nothing_to_do_with_each_other(procs: Pool) -> None:
    procs(2).run(local_beside_others)


# ------------------------------------------------------------------------------------------------------------ buffers


def normed(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)


def buffers(rank: int, size: int, settings: dict[str, Any]) -> tuple[bytes, bytes]:
    return tuple(train(wrap(normed(), **settings), rank) for wrap in (DDP, TorchDDP))  # type: ignore[return-value]


@pytest.mark.parametrize("settings", [{}, {"forward_sync_buffers": False}], ids=["synced", "left alone"])
def test_buffers_as_torch_does(procs: Pool, settings: dict[str, Any]) -> None:
    results = procs(2).run(buffers, settings)
    for ours, torchs in results:
        assert_same_bits(unpacked(ours), unpacked(torchs))


def sync_batch_norm(rank: int, size: int) -> None:
    for wrap in (DDP, TorchDDP):
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            wrap(nn.SyncBatchNorm.convert_sync_batchnorm(normed()))


def test_sync_batch_norm_is_refused_on_cpu_as_in_torch(procs: Pool) -> None:
    procs(2).run(sync_batch_norm)


# ----------------------------------------------------------------------------------------------------- uneven inputs


def uneven(rank: int, size: int, divide_by_initial: bool, accumulate: bool) -> list[bytes]:
    results = []
    for wrap in (DDP, TorchDDP):
        model = wrap(normed(), bucket_cap_mb=1e-6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                if accumulate:
                    with model.no_sync():
                        model(batch(rank, step + 50)).square().mean().backward()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
        results.append(packed(values(model)))
    return results


@pytest.mark.parametrize("divide_by_initial", [True, False], ids=["by all", "by those with data"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulating"])
def test_uneven_inputs_as_torch_does(procs: Pool, divide_by_initial: bool, accumulate: bool) -> None:
    for ours, torchs in procs(3).run(uneven, divide_by_initial, accumulate):
        assert_close(unpacked(ours), unpacked(torchs))


def uneven_and_early(rank: int, size: int) -> int:
    model = DDP(mlp(3, 4, 2))
    steps = []

    def loop() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                model(batch(rank, step)).sum().backward()
                steps.append(step)

    with pytest.raises(RuntimeError, match="exhausted all inputs|Detected at least one rank"):
        loop()
    return len(steps)


def test_uneven_inputs_may_be_refused(procs: Pool) -> None:
    assert procs(2).run(uneven_and_early) == [2, 2]


# ------------------------------------------------------------------------------------------------------------ compile


def compiled(rank: int, size: int, backend: str) -> bytes:
    module = mlp(3, 4, 2)
    module[0] = torch.compile(module[0], backend=backend)  # type: ignore[assignment]
    model = DDP(module)
    for _ in range(2):
        result = summed_grads(model, rank)
    return packed({name.replace("_orig_mod.", ""): grad for name, grad in unpacked(result).items()})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_submodule(procs: Pool, backend: str) -> None:
    for got in procs(2).run(compiled, backend):
        assert_close(unpacked(got), expected_grads(2))


def copy_on_rank_0(rank: int, size: int) -> float:
    model = DDP(mlp(3, 3))
    kept = copy.deepcopy(model) if rank == 0 else None
    other = DDP(mlp(3, 3))
    for wrapped in (model, other):
        wrapped(draw(rank, 2, 3)).sum().backward()
    if kept is None:
        return 0.0
    pairs = zip(kept.parameters(), model.parameters(), strict=True)
    return sum(float((p - q).detach().abs().sum()) for p, q in pairs)


def test_one_rank_may_make_a_copy_for_itself(procs: Pool) -> None:
    assert procs(2).run(copy_on_rank_0) == [0.0, 0.0]


# ------------------------------------------------------------------------------------------- a transport as an object


def over_an_object(rank: int, _: int) -> tuple[bytes, bytes, list[str]]:
    assert dist.group.WORLD is not None
    transport = TorchDistTransport(dist.group.WORLD)
    first, second = (DDP(mlp(3, 4, 2), transport=transport) for _ in range(2))
    one, two = (model(batch(rank)).square().sum() for model in (first, second))
    (one + two if rank else two + one).backward()
    with pytest.raises(IllegalMove) as copied:
        copy.deepcopy(first)
    with pytest.raises(IllegalMove) as moved:
        first._update_process_group(dist.new_group())
    assert first.process_group is dist.group.WORLD
    assert first._get_ddp_logging_data()["backend_name"] == "gloo"
    return packed(grads(first)), packed(grads(second)), [str(copied.value), str(moved.value)]


def test_a_transport_may_be_given_as_an_object(procs: Pool) -> None:
    for first, second, (copied, moved) in procs(2).run(over_an_object):
        assert_close(unpacked(first), expected_grads(2))
        assert_close(unpacked(second), expected_grads(2))
        assert "given a Transport object cannot be copied or pickled" in copied
        assert "given a Transport object cannot move to another process group" in moved
