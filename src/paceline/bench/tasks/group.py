"""The process group of one contender."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import UsageError

TIMEOUT = timedelta(seconds=300)


class Meeting:
    """Rank 0 hosts a store on a port that the system chose; the conductor tells the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: dist.TCPStore | None = None

    def port(self) -> int:
        if self._rank or self._size == 1:
            return 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return int(self._store.port)

    def form(self, port: int, device: torch.device, backend: str = "auto") -> None:
        """Form the default group: `auto` is gloo, with NCCL beside it on a GPU."""
        if self._size == 1:
            store: dist.Store = dist.HashStore()
        else:
            self._store = self._store or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
            store = self._store
            # Accelerate and DeepSpeed look for it even when the group is there.
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


def choose_device(kind: str, rank: int, size: int) -> torch.device:
    """The device of a rank. Ranks share a GPU when there are not enough."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise UsageError("device=cuda was asked for, but torch sees no CUDA device here; use --device cpu")
    if count < size:
        # NCCL refuses two ranks on one device of one host, so each takes itself for a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
