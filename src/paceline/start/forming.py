"""Forming torch's default process group, and the cleanup after that has failed."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store


def default_backend(device: torch.device) -> str:
    """A rank that is set to use the CPU needs no NCCL, which does not allow two ranks on one GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def form_group(store: Store, rank: int, size: int, backend: str, device: torch.device, within_s: float) -> None:
    """Form the default group. Its ranks have `within_s` seconds to connect; its collectives have torch's timeout."""
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=within_s),
            # NCCL then connects here, where a failure is reported clearly, and not inside the first backward.
            device_id=device if device.type == "cuda" and "nccl" in backend else None,
        )
    except (RuntimeError, ValueError):
        forget_failed_group()
        raise
    c10d = dist.distributed_c10d
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # public in newer torch
    if "gloo" in backend or "nccl" in backend:
        set_timeout(c10d._get_default_timeout(dist.Backend(backend)))


def leave_group() -> None:
    """Leave the default group, if there is one; it may be broken."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError:  # it is too damaged to be destroyed
            forget_failed_group()


def forget_failed_group() -> None:
    """Reset torch's count of groups, after one that failed or cannot be destroyed.

    The count names the next group: this rank would never again find ranks with another count. Destroying a
    default group, even of one rank, resets the count.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
