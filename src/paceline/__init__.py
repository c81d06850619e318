"""paceline: data-parallel training for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.checked import all_gather, all_reduce, barrier, broadcast
    from paceline.data.sampler import DistributedSampler
    from paceline.replica.ddp import DistributedDataParallel
    from paceline.start import get, init, shutdown
    from paceline.world import World

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "get",
    "init",
    "shutdown",
]

_HOMES = {
    "DistributedDataParallel": "replica.ddp",
    "DistributedSampler": "data.sampler",
    "World": "world",
    "all_gather": "collectives.checked",
    "all_reduce": "collectives.checked",
    "barrier": "collectives.checked",
    "broadcast": "collectives.checked",
    "get": "start",
    "init": "start",
    "shutdown": "start",
}
_FOLDERS = ("collectives", "data", "errors", "layout", "reducer", "replica", "start", "strategies", "trace", "world")


def __getattr__(name: str) -> Any:
    """Names are loaded when first used: the command line answers `--help` without loading torch."""
    if name in _HOMES:
        # Kept in the module, so that this function is asked once per name.
        value = globals()[name] = getattr(import_module(f"paceline.{_HOMES[name]}"), name)
        return value
    if name in _FOLDERS:
        return import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
