"""How a rank is set up for its first cell: its identity, torch, the names that cells find, and tqdm as text."""

import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class RankIdentity:
    """Which rank this is. `device` is "cpu" or "cuda:1"; `gpu_id` is the number that the user gave that GPU."""

    rank: int
    size: int
    device: str
    gpu_id: int | None

    @classmethod
    def from_environment(cls) -> "RankIdentity":
        gpu_id = os.environ.get("PACELINE_NOTEBOOK_GPU", "")
        return cls(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            device=os.environ["PACELINE_NOTEBOOK_DEVICE"],
            gpu_id=int(gpu_id) if gpu_id else None,
        )


def set_up(shell: Any, identity: RankIdentity) -> Mapping[str, Any]:
    """Load torch, take the device, and define the names that cells use. Returns what was found."""
    import torch

    device = torch.device(identity.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shell.push(names(identity, device), interactive=False)  # not shown by %who
    return {"pid": os.getpid(), "python": platform.python_version(), "torch": torch.__version__, "device": str(device)}


def names(identity: RankIdentity, device: Any) -> dict[str, Any]:
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
        "rank": identity.rank,
        "local_rank": identity.rank,
        "world_size": identity.size,
        "gpu_id": identity.gpu_id,
        "device": device,
        "__rank__": identity.rank,
        "__world_size__": identity.size,
    }


def warm_up(shell: Any) -> None:
    """While the first cells run, load what IPython needs to show an error: its modules, and the source of torch's
    collectives. Otherwise the first error, and the first interrupt of a collective, would take a second longer."""
    threading.Thread(target=_show_an_error, args=(shell,), name="paceline warm-up", daemon=True).start()


def _show_an_error(shell: Any) -> None:
    import torch.distributed as dist

    try:
        dist.all_reduce(None)  # refused before anything is sent
    except (TypeError, ValueError, RuntimeError):
        shell.InteractiveTB.structured_traceback(*sys.exc_info())


class TextBars(MetaPathFinder, Loader):
    """Makes `tqdm.notebook` hold the bars of `tqdm.std`.

    The widgets of a rank reach no frontend: the user would see a bar that stays at 0 %. Text does reach it, and is
    drawn there as the bars of all ranks. `tqdm.auto` looks at the kernel's settings, where it finds no widgets.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == "tqdm.notebook" else None

    def exec_module(self, module: ModuleType) -> None:
        std: Any = import_module("tqdm.std")
        names = {"tqdm": std.tqdm, "trange": std.trange, "tqdm_notebook": std.tqdm, "tnrange": std.trange}
        module.__dict__.update(names, __all__=list(names))
