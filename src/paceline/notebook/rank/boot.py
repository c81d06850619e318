"""A rank's first minute: its place, torch, and the names that cells find."""

import os
import platform
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where this rank stands. `device` is "cpu" or "cuda:1"; `gpu_id` is the number that the user gave that GPU."""

    rank: int
    size: int
    device: str
    gpu_id: int | None

    @classmethod
    def from_environment(cls) -> "Place":
        gpu_id = os.environ.get("PACELINE_NOTEBOOK_GPU", "")
        return cls(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            device=os.environ["PACELINE_NOTEBOOK_DEVICE"],
            gpu_id=int(gpu_id) if gpu_id else None,
        )


def boot(shell: Any, place: Place) -> Mapping[str, Any]:
    """Load torch, take the device, and give cells their names. Says what was found."""
    import torch

    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shell.push(names(place, device), interactive=False)  # not shown by %who
    return {"pid": os.getpid(), "python": platform.python_version(), "torch": torch.__version__, "device": str(device)}


def names(place: Place, device: Any) -> dict[str, Any]:
    """What a cell finds without an import."""
    import torch
    import torch.distributed as dist

    import paceline
    from paceline.randomness import seed_all

    return {
        "torch": torch,
        "dist": dist,
        "paceline": paceline,
        "get": paceline.get,
        "set_seed": partial(seed_all, device=device),
        "rank": place.rank,
        "local_rank": place.rank,
        "world_size": place.size,
        "gpu_id": place.gpu_id,
        "device": device,
        "__rank__": place.rank,
        "__world_size__": place.size,
    }


def warm(shell: Any) -> None:
    """Load beside the first cells what IPython needs to show an error: its modules, and the source of torch's
    collectives. The first error, and the first interrupt of a collective, would take a second longer."""
    threading.Thread(target=_show_an_error, args=(shell,), name="paceline warm", daemon=True).start()


def _show_an_error(shell: Any) -> None:
    import torch.distributed as dist

    try:
        dist.all_reduce(None)  # refused before anything is sent
    except (TypeError, ValueError, RuntimeError):
        shell.InteractiveTB.structured_traceback(*sys.exc_info())
