"""Tasks whose ranks form a process group, and the device of a rank."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.bench.tasks import Task
from paceline.errors import UsageError
from paceline.launch.rank_environment import LOOPBACK
from paceline.start.bound_store import host_store

TIMEOUT = timedelta(seconds=300)


class GroupTask(Task):
    """Rank 0 hosts a store on a port that the system chose; the conductor passes it on to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: dist.TCPStore | None = None

    def bind(self) -> int:
        if self._rank or self._size == 1:
            return 0
        self._store = host_store(LOOPBACK, 0, TIMEOUT)
        return int(self._store.port)

    def _form_group(self, port: int, device: torch.device, backend: str = "auto") -> None:
        """Form the default group: `auto` is gloo, with NCCL beside it on a GPU."""
        if self._size == 1:
            store: dist.Store = dist.HashStore()
        else:
            self._store = self._store or dist.TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)
            store = self._store
            # Accelerate and DeepSpeed read it even though the group exists.
            os.environ["MASTER_PORT"] = str(port)
        if backend == "auto":
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=self._rank,
            world_size=self._size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(kind: str, rank: int, size: int) -> torch.device:
    """The device of a rank. Ranks share a GPU when there are not enough."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise UsageError("device=cuda was requested, but torch sees no CUDA device here; use --device cpu")
    if count < size:
        # NCCL refuses two ranks on one device of one host, so each rank claims to be a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before the timed part, and not during it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait for everything that was queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
