"""Several NCCL ranks on one GPU: each takes itself for a host of its own, so NCCL talks over sockets."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

Check = Callable[..., None]


def on_nccl(rank: int, size: int, store: str, backend: str, check: Check, *args: Any) -> None:
    """For the pool, without its group: form a group that has NCCL and run `check(rank, size, *args)`."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        check(rank, size, *args)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
