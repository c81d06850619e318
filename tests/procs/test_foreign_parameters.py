"""Parameters and settings of other kinds of parallelism: refused by name, before anything is started."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paceline
from paceline.errors import UsageError
from tests.models import DDP, draw, mlp
from tests.pool import Pool

PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")


class Wrapped(torch.Tensor):
    """As libraries for float8 and other quantized weights make them: the numbers are in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [arg._inner if isinstance(arg, Wrapped) else arg for arg in args]
        found = func(*plain, **kwargs or {})
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


def refused(net: nn.Module, **arguments: Any) -> str:
    with pytest.raises((UsageError, RuntimeError, TypeError)) as caught:
        DDP(net, timeout=20, **arguments)
    return f"{type(caught.value).__name__}: {caught.value}"


def parallel(rank: int, size: int, placement: str) -> dict[str, str]:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    found = {"a mesh of two dimensions": refused(mlp(8, 16, 4), placement=placement, device_mesh=mesh)}
    net: Any = mlp(8, 16, 4)
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh["tp"], [Shard(0)]))
    group = mesh["dp"].get_group()
    found["a part of a parameter"] = refused(net, placement=placement, process_group=group)
    if placement != "ddp":
        found["a slice of a mesh"] = refused(net, placement=placement, device_mesh=mesh["dp"])
        found["a slice over whole parameters"] = refused(mlp(8, 4), placement=placement, device_mesh=mesh["dp"])
        model = DDP(mlp(8, 4), placement=placement, process_group=group, timeout=20)
        model(draw(rank, 2, 8)).sum().backward()
    dist.barrier()  # nobody waits for anybody: all were refused
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensor_parallel_meshes_are_refused_by_name(procs: Pool, placement: str) -> None:
    for found in procs(2).run(parallel, placement):
        assert found.pop("a mesh of two dimensions").startswith("RuntimeError: Only 1D device mesh is supported")
        assert "UsageError: 0.weight is a DTensor, of which" in found.pop("a part of a parameter")
        assert len(found) == (0 if placement == "ddp" else 2)
        for text in found.values():
            assert text.startswith("UsageError: device_mesh= is a slice") and f'placement="{placement}"' in text


def quantized(rank: int, size: int, placement: str) -> dict[str, str]:
    found = {}
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        net: Any = mlp(8, 16, 4)
        net[2].weight = nn.Parameter(net[2].weight.detach().to(kind))
        found[str(kind)] = refused(net, placement=placement)
    net = mlp(8, 16, 4)
    net[2].weight = nn.Parameter(Wrapped(net[2].weight.detach()))
    if placement != "ddp":
        found["wrapped"] = refused(net, placement=placement)
    dist.barrier()
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_float8_and_quantized_parameters_are_refused_by_name(procs: Pool, placement: str) -> None:
    for found in procs(2).run(quantized, placement):
        wrapped = found.pop("wrapped", "UsageError: 2.weight is a Wrapped, which")
        assert wrapped.startswith("UsageError: 2.weight is a Wrapped, which")
        for kind, text in found.items():
            assert text.startswith(f"UsageError: 2.weight is trained in {kind}, in which gradients cannot be reduced")


@pytest.mark.parametrize("name", ["cpu_offload", "offload_policy", "mp_policy", "sharding_strategy"])
def test_settings_of_other_libraries_are_answered(name: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {name}=: ") as caught:
        DDP(mlp(8, 4), **{name: True})
    expected = {
        "cpu_offload": "zero3",
        "offload_policy": "zero3",
        "mp_policy": "master=",
        "sharding_strategy": "shard=",
    }
    assert expected[name] in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'placment'"):
        DDP(mlp(8, 4), placment="zero1")
    assert issubclass(paceline.DistributedDataParallel, nn.parallel.DistributedDataParallel)
