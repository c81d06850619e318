"""A second set of connections over the ranks of a group, for collectives that must not be mixed up with the group's."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

# Which of torch's backends can be made here, and for which kind of device.
_KINDS = {"gloo": "cpu", "nccl": "cuda"}
# A device may be some collectives behind its host; one whose peer is gone never gets there.
BEHIND_S = 2.0


def own_backends(group: dist.ProcessGroup) -> dict[str, Any]:
    """The backends of `group` that `form_own_group` can make again, by name. Empty if it has another one."""
    if type(group) is not dist.ProcessGroup or group not in dist.distributed_c10d._world.pg_map:
        return {}
    # "cpu:gloo,cuda:nccl"; one backend for all kinds of devices is listed once per kind
    listed = {pair.partition(":")[2] for pair in str(dist.get_backend_config(group)).split(",")}
    if not listed or not listed <= set(_KINDS):
        return {}
    return {name: group._get_backend(torch.device(_KINDS[name])) for name in sorted(listed)}


def form_own_group(backends: Mapping[str, Any], store: Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group that torch does not list, with backends like those given. All ranks call it. Blocks until they have."""
    own = dist.ProcessGroup(store, rank, size)
    for name, like in backends.items():
        if name == "gloo":
            made: Any = dist.ProcessGroupGloo(store, rank, size, like.options._timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = like.options._timeout
            made = dist.ProcessGroupNCCL(store, rank, size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        own._register_backend(torch.device(_KINDS[name]), kind, made)
        if name == "gloo" and len(backends) == 1:
            own._register_backend(torch.device("cuda"), kind, made)  # gloo moves device memory too
    return own


def leave_own_group(own: dist.ProcessGroup, last: Sequence[Any]) -> None:
    """Give up a group that `form_own_group` has made. `last` are the newest works that were started in it.

    gloo's connections end with the group. NCCL's communicators are aborted there too, with a warning of torch that
    nobody destroyed them, and with whatever collective is still under way: so that is waited for, a moment.
    """
    if torch.device("cuda") not in own._device_types:
        return
    backend = own._get_backend(torch.device("cuda"))
    if backend.name() != "nccl" or torch.cuda.is_current_stream_capturing():
        return
    until = time.monotonic() + BEHIND_S
    while not all(work.is_completed() for work in last) and time.monotonic() < until:
        time.sleep(0.001)
    backend.abort()
