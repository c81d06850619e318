"""How tensors of one device are sent over a torch process group, determined once per device."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

from paceline.collectives.own_group import backend_name
from paceline.collectives.protocols import Op, Traits, check_reducible, check_tree
from paceline.collectives.python_group import PythonGroup
from paceline.collectives.torch_ops import reduce_options
from paceline.collectives.torch_staged import DeviceStaging

if TYPE_CHECKING:
    from paceline.collectives.torch_dist import TorchDistTransport

_ADDS_PLAINLY = ("gloo", "nccl")  # in the type of the tensors


@dataclass(frozen=True, slots=True)
class Route:
    """How tensors on one device are sent."""

    traits: Traits
    backend: str
    detour: DeviceStaging | PythonGroup | None  # the object that runs their collectives, if the backend does not
    gathers_by_copies: bool = False


def find_route(transport: "TorchDistTransport", device: torch.device) -> Route:
    users_group, size = transport.users_group, transport.size
    backend = backend_name(transport.carrier.group, device)
    if backend is None:
        # paceline's duplicate has no backend for this kind of device; a group written in Python has none at all.
        backend = "" if transport.carrier.duplicates else str(users_group.name())
    if type(users_group) is not dist.ProcessGroup:
        return Route(Traits(), backend, PythonGroup(users_group, backend, weakref.proxy(transport)))
    on_host = device.type == "cpu"
    traits = Traits(
        single=size == 1 and not transport.counts_as_several,
        native_mean=device.type == "cuda" and backend == "nccl",
        # The sum of two is one addition, rounded once: any order gives the bits of torch's `a + b`.
        tree_sum=size == 1 or (size == 2 and backend in _ADDS_PLAINLY),
        stream_ordered=not on_host and backend != "gloo",
        all_to_all=True,
        reduce_scatter=device.type == "cuda" and backend == "nccl",
    )
    detour = DeviceStaging(weakref.proxy(transport)) if on_host and backend in ("", "nccl") else None
    return Route(traits, backend, detour, gathers_by_copies=on_host and backend == "gloo")


PreparedAllReduce = tuple[Route, AllreduceOptions, int]  # the number is what the sum is divided by


def prepare_all_reduce(route: Route, flat: torch.Tensor, op: Op, size: int) -> PreparedAllReduce:
    """The prepared values for every all_reduce of such tensors, after checking that it is possible."""
    check_reducible(flat, op)
    check_tree(op, route.traits.tree_sum)
    options, divides = reduce_options(op, route.backend)
    return route, options, size if divides else 1
